"""The loop and what it steers; torch-free."""
