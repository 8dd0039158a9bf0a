"""Chats with tools: requests and answers in the dialects of three APIs, and as text of a model. Torch-free."""
