"""The embedded engine: continuous batching over any Hugging Face causal LM."""
