"""Worker processes: how they are started, locally or by Ray, called, and ended. The only home of Ray."""
