"""Calls to engines: a client, the dialects that engines speak, and the settings of sampling; torch-free."""
