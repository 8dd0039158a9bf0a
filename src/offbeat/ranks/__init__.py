"""Train ranks as one trainer: their start, the calls to them, and the spreading of batches over them; torch-free."""
