"""Commands: parse, dispatch, print."""
