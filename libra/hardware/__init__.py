"""Seconds and bytes of models on GPUs: measured tables where there are profiles, analytic forms elsewhere."""

from libra.hardware.engine import ModelOnGPU, Overhead, engine_seconds
from libra.hardware.forms import Efficiencies
from libra.hardware.gpus import GPU, known_gpus, load_gpu
from libra.hardware.residuals import Residuals, SampledSeconds, sampled
from libra.hardware.seconds import EngineSeconds
from libra.hardware.shapes import ModelShape, known_models, load_shape

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
    "sampled",
]
