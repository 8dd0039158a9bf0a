"""Implementations of `Environment`: a user's own class, tools, and the games of other libraries."""
