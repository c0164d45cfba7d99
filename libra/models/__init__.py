"""Preparing pretrained models without a model hub."""

from __future__ import annotations

from libra.models.prepare import Prepared, prepare

__all__ = ["Prepared", "prepare"]
