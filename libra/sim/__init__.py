"""Simulation of a run in virtual time under the live policy objects: discrete events, seeded, no
clock."""
