"""Agents of users, which speak to the model over HTTP, and the exact tokens behind their
conversations."""
