"""When a run takes no further step because engine and trainer disagree, and how one goes on with it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from libra.train.mismatch import alarm_text
from libra.worker.run_spec import RunSpec

logger = logging.getLogger(__name__)


def pause_reason(spec: RunSpec, numbers: Mapping[str, Any]) -> str | None:
    """Why no step may follow the one with these numbers, None where it may; says in the log how far apart the two sides are."""
    trainer, step = spec.config.trainer, int(numbers["step"])
    mean, largest = float(numbers["mismatch_mean_abs"]), float(numbers["mismatch_max_abs"])
    count = int(numbers["mismatch_tokens"])
    logger.info(
        "mismatch: step %d: |log p(rollout) - log p(trainer)| %.3g in the mean, %.3g at most, k3 %.3g, effective %.4f of %d tokens",
        step, mean, largest, numbers["mismatch_k3"], numbers["mismatch_effective_frac"], count,
    )  # fmt: skip
    text = alarm_text(mean, largest, count, trainer.mismatch_alarm, step)
    if text is None or trainer.mismatch_action != "pause":
        return None
    return (
        f"{text}. The run is paused: step {step} was taken and version {step + 1} published, nothing after it. To go on, type "
        f"libra resume {spec.directory} (it pauses again at the next alarm), with trainer.mismatch_action=warn to go on regardless"
    )
