"""Tools that models call: Python in a sandbox, and search over a folder of texts."""
