"""Worker processes: starts, calls and ends of them, locally or by Ray. The only user of Ray."""
