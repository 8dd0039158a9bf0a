"""Loading, writing and building causal language models; packed attention and log-probabilities."""
