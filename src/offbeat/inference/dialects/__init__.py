"""What is said to an engine and how its answers are read: one module per kind of engine, all of its quirks in it."""
