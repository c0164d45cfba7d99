"""Colours of the states of workers, on the page and in reports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

STATE_COLORS: Final[Mapping[str, str]] = {
    "generating": "#3f7fc4", "acting": "#e08214", "training": "#2a9d6f", "turned": "#7cc29f", "moving": "#7b68b5",
    "starting": "#8fa1ab", "version": "#d4b13f", "trajectories": "#e3cf7a", "grading": "#c58b6b", "batch": "#a1887f",
    "tail": "#d06a6a", "tools": "#e6a57e", "dispatch": "#b85c8a", "no_calls": "#c3ccd1", "evaluation": "#8fb8de",
    "turning": "#c9a27e", "wave": "#d9c3a5", "returning": "#a67f5d",
    "role": "#6d5a4f", "lost": "#8e2430", "quarantined": "#5d1f2b", "lent": "#b0bec5", "nothing": "#aab4ba",
}  # fmt: skip
"""Colour by state of `libra.observe.timeline.states`."""
