"""Authenticated connections between a run's processes, for batch rows, weights and gradients."""

from libra.transport.channel import SILENCE_S, Address, Channel, Server, accept, connect, new_secret

__all__ = ["SILENCE_S", "Address", "Channel", "Server", "accept", "connect", "new_secret"]
