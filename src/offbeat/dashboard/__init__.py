"""Reports drawn from run files alone."""
