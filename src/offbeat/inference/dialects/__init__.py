"""Dialects: the requests and answers of each kind of engine. One module per kind contains all of its quirks."""
