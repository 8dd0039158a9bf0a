"""What a version of weights is: its manifest, its names, the ways in which it leaves the trainer, and what an engine's proof is worth."""
