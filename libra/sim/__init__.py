"""Simulation in virtual time under the live policy objects: seeded discrete events."""
