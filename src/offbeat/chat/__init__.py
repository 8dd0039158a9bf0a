"""Chats with tools: what clients send and receive, in the dialects of three APIs, and how a model reads and writes them. Torch-free."""
