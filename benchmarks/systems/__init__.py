"""Training systems compared in virtual time."""
