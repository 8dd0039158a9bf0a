"""Worker processes: launchers, groups, assembly. The only home of Ray."""
