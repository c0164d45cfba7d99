"""Contradictions inside section ``services``; as in `libra.config.cross_field_checks`."""

from __future__ import annotations

from collections.abc import Iterator

from libra.config.models import RunSections
from libra.config.services import MODEL_FUNCTIONS


def services_contradictions(config: RunSections) -> Iterator[str]:
    """A message for each."""
    for name, entry in config.services.named.items():
        if entry.model is None and entry.function in MODEL_FUNCTIONS:
            yield (
                f"services.named: {name!r} has function {entry.function}, which asks a model, and no model; type "
                f"services.named={{{name}: {{model: MODEL}}}} (a directory, a Hugging Face id or libra/NAME), or a function of "
                "your own as package.module:attribute"
            )
