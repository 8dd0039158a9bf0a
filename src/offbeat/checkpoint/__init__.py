"""The index of a run's checkpoints: which are complete, which are damaged, and which to resume from; torch-free."""
