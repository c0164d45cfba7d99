"""Seconds of a vLLM engine's forward passes, from the time stamps of the messages that its process sends after each pass.

The process steps continuously while it has requests, so the time between two messages is one pass, with its scheduling,
sampling and sending. A pass that began while nothing ran, one after a pause, and one with a probe in it do not count.
"""

from __future__ import annotations

from typing import Any

from libra.rollout.engine_capacity import PassMeter

PROBE_ID = "probe-"
"""Prefix of the name of a probe's request."""


class PassWatch:
    """Follows the messages of one engine process; `meter` may be that of a process before it."""

    def __init__(self, meter: PassMeter) -> None:
        self.meter = meter
        self._tokens: dict[str, int] = {}  # of context, of each running request
        self._last_s: float | None = None

    def stood(self) -> None:
        """The engine was paused or idle: the time until the next message is not a pass."""
        self._last_s = None

    def saw(self, outputs: Any) -> None:
        """The process sent the outputs of a pass (``EngineCoreOutputs`` of vLLM)."""
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
