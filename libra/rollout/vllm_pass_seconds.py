"""Seconds of a vLLM engine's forward passes, from the time stamps of the messages that its process sends after each pass.

The process steps continuously while it has requests, so the time between two messages is one pass, with its scheduling,
sampling and sending. A pass that began while nothing ran, one after a pause, and one with a probe in it do not count. Passes with
drafts (`libra.rollout.vllm_drafts`) are counted apart, by batch size.
"""

from __future__ import annotations

from typing import Any

from libra.rollout.draft_length import MOST_ROWS, DraftedByRows, count
from libra.rollout.engine_capacity import PassMeter

PROBE_ID = "probe-"
"""Prefix of the name of a probe's request."""


class PassWatch:
    """Follows the messages of one engine process; `meter` and ``drafted`` (None: it does not speculate) may be those of a process
    before it."""

    def __init__(self, meter: PassMeter, drafted: DraftedByRows | None = None) -> None:
        self.meter, self._drafted = meter, drafted
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
            self._count(outputs, context, prefilled, outputs.timestamp - self._last_s)
        self._last_s = outputs.timestamp if self._tokens else None

    def _count(self, outputs: Any, context: int, prefilled: int, seconds: float) -> None:
        """A pass after which these outputs were sent."""
        stats, rows = outputs.scheduler_stats, len(outputs.outputs)
        drafted = stats.spec_decoding_stats.num_draft_tokens if stats and stats.spec_decoding_stats else 0
        if not drafted:
            self.meter.add(rows, context, prefilled, seconds)
        if self._drafted is not None and not prefilled and 0 < rows <= MOST_ROWS:
            generated = sum(len(each.new_token_ids) for each in outputs.outputs)
            count(self._drafted, rows, drafted, generated, seconds)
