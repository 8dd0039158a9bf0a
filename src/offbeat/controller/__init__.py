"""The training loop, and all that it calls in its own process; torch-free."""
