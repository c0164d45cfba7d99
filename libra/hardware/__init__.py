"""Seconds and bytes of models on GPUs: rooflines, corrected by measured tables."""

from libra.hardware.engine_seconds import EngineSeconds, ModelOnGPU, Overhead, engine_seconds
from libra.hardware.gpus import GPU, known_gpus, load_gpu
from libra.hardware.layer_seconds import Efficiencies
from libra.hardware.shapes import ModelShape, known_models, load_shape
from libra.hardware.tables import Residuals, read_tables

__all__ = [
    "GPU",
    "Efficiencies",
    "EngineSeconds",
    "ModelOnGPU",
    "ModelShape",
    "Overhead",
    "Residuals",
    "engine_seconds",
    "known_gpus",
    "known_models",
    "load_gpu",
    "load_shape",
    "read_tables",
]
