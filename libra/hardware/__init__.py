"""Seconds and bytes of models on GPUs: measured tables where there are profiles, analytic forms elsewhere."""

from libra.hardware.seconds import EngineSeconds

__all__ = ["EngineSeconds"]
