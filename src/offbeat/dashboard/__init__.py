"""Reports drawn only from the files of a run."""
