"""Seconds and bytes of models on GPUs: measured tables where there are profiles, analytic forms elsewhere."""

from libra.hardware.engine import ModelOnGPU, Overhead, engine_seconds
from libra.hardware.gpus import GPU, known_gpus, load_gpu
from libra.hardware.rooflines import Efficiencies
from libra.hardware.seconds import EngineSeconds
from libra.hardware.shapes import ModelShape, known_models, load_shape
from libra.hardware.shipped import read_tables
from libra.hardware.timing_residuals import Residuals, SampledSeconds, sampled

__all__ = [
    "GPU",
    "Efficiencies",
    "EngineSeconds",
    "ModelOnGPU",
    "ModelShape",
    "Overhead",
    "Residuals",
    "SampledSeconds",
    "engine_seconds",
    "known_gpus",
    "known_models",
    "load_gpu",
    "load_shape",
    "read_tables",
    "sampled",
]
