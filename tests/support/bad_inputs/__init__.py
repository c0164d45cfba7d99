"""Inputs that a new user may get wrong, in tables: tests/first_hour tries each."""
