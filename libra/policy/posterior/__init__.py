"""The posterior of a trajectory's remaining length."""
