"""Child processes that answer calls over a socket pair: the parent's half is in `child`, the child's in `serving`."""
