"""Engines that generate turns, and the chat format between messages and token ids."""

from __future__ import annotations

from libra.rollout.chat_format import ChatFormat, load_chat_format
from libra.rollout.engine import EngineStats, ReadsColumns, RolloutEngine
from libra.rollout.transformers_engine import TransformersEngine
from libra.rollout.vllm.async_engine import VLLMEngine

__all__ = [
    "ChatFormat",
    "EngineStats",
    "ReadsColumns",
    "RolloutEngine",
    "TransformersEngine",
    "VLLMEngine",
    "load_chat_format",
]
