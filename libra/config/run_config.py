"""`RunConfig`: every setting of a run, checked across sections."""

from __future__ import annotations

from typing import Self

from pydantic import model_validator

from libra.config.cross_field_checks import contradictions
from libra.config.models import RunSections


class RunConfig(RunSections):
    """Every setting of one run. Build it with `load_config` or `config_from_dict`, whose errors are Libra's own."""

    @model_validator(mode="after")
    def _check_across_sections(self) -> Self:
        if found := contradictions(self):
            raise ValueError("; ".join(found))
        return self
