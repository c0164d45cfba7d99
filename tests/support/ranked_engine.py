"""An engine that declares two tensor-parallel degrees, and computes on one rank whatever its degree."""

from dataclasses import replace
from pathlib import Path

from libra.rollout.transformers_engine import TransformersEngine
from libra.types import EngineCapacity


class RankedEngine(TransformersEngine):
    """Two degrees."""

    tp_degrees = (1, 2)

    def __init__(self, model_dir: Path, *, slots: int, max_context_tokens: int, version: int = 0, tp: int = 1) -> None:
        super().__init__(model_dir, slots=slots, max_context_tokens=max_context_tokens, version=version, threads=1)
        self.tp = tp

    def capacity(self) -> EngineCapacity:
        return replace(super().capacity(), tp=self.tp)
