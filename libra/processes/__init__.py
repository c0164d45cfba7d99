"""Processes that Libra starts: what they get of the environment, their end with all that they
started, and locks among them."""
