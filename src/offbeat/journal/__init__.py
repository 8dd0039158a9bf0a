"""The journal of a run: what was generated and done since its checkpoints, so that a kill loses none of it."""
