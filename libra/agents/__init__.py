"""Agents of users, which query the model over HTTP, and the exact tokens of their conversations."""
