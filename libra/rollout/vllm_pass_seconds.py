"""Seconds of a vLLM engine's forward passes, read off what its process sends after each of them.

The engine process stamps every message with its own clock, and steps without a break while it has requests: between two messages
lies one pass with all that belongs to it (scheduling, sampling, sending). A pass that began while nothing ran, one after a pause,
and one with a probe in it are not taken.
"""

from __future__ import annotations

from typing import Any

from libra.rollout.engine_capacity import PassMeter

PROBE_ID = "probe-"
"""What the name of a probe's request begins with."""


class PassWatch:
    """Follows the messages of one engine process; `meter` may be that of a process before it."""

    def __init__(self, meter: PassMeter) -> None:
        self.meter = meter
        self._tokens: dict[str, int] = {}  # of context, of each running request
        self._last_s: float | None = None

    def stood(self) -> None:
        """The engine was stopped, or idle: the time until the next message is no pass."""
        self._last_s = None

    def saw(self, outputs: Any) -> None:
        """The process sent what a pass gave (``EngineCoreOutputs`` of vLLM)."""
        prefilled, context, probed = 0, 0, False
        for each in outputs.outputs:
            name, stats = each.request_id, each.prefill_stats
            if stats is not None:
                prefilled += stats.num_computed_tokens
                self._tokens[name] = stats.num_prompt_tokens
                probed |= name.startswith(PROBE_ID)
            context += self._tokens.get(name, 0)
            if each.finish_reason is not None:
                self._tokens.pop(name, None)
            elif name in self._tokens:
                self._tokens[name] += len(each.new_token_ids)
        for name in outputs.finished_requests or ():  # aborted
            self._tokens.pop(name, None)
        if self._last_s is not None and not probed:
            self.meter.add(len(outputs.outputs), context, prefilled, outputs.timestamp - self._last_s)
        self._last_s = outputs.timestamp if self._tokens else None
