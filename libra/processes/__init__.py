"""Processes that Libra starts: their environment, their end with all children, and locks."""
