"""Drafts of vLLM's scheduler: tokens of a group's other samples, for steps of few requests that all decode.

Only vLLM's engine process imports it, because `libra.rollout.vllm_scheduler` mixes it in. vLLM would ask a proposer in its workers,
which knows no groups, and one more answer per step of them; here the scheduler, which has every request's tokens, drafts before it
schedules. `libra.rollout.vllm_coupled` decides in the workers what is kept.

Invariants
----------
1. Drafts are made for the step that is scheduled next, and dropped after it: none waits through a pause, in which weights change.
2. Nothing is drafted in a step that prefills, that begins a request, or for a probe.
3. A request never gets more drafts than it may still generate, so it needs no more KV than without them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from libra.rollout.draft_length import DraftLength
from libra.rollout.drafts import LONGEST, Drafts
from libra.rollout.vllm_settings import GROUP


class Drafting:
    """The additions of a drafting scheduler to a scheduler of vLLM, which has these attributes."""

    running: list[Any]
    waiting: Any
    num_spec_tokens: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # For vLLM that is the number of places to fill with drafts of -1 in a request that begins with one token.
        self.num_spec_tokens = 0
        self._drafts, self._length = Drafts(), DraftLength()
        self._begun_s = 0.0
        self._chosen: int | None = None  # drafts per request that were chosen for the step; None: it was not asked

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """One step, with drafts if they pay off."""
        self._begun_s = time.perf_counter()
        drafted = self._draft()
        try:
            return super().schedule(*args, **kwargs)  # type: ignore[misc]
        finally:
            for request in drafted:
                request.spec_token_ids = []

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """What the step gave; the counters of drafts go along to the client."""
        outputs = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        if self._chosen is None or not scheduler_output.num_scheduled_tokens:
            return outputs
        length, self._chosen = self._chosen, None
        rows = len(scheduler_output.num_scheduled_tokens)
        drafted = sum(map(len, scheduler_output.scheduled_spec_decode_tokens.values()))
        generated = sum(len(each.new_token_ids) for one in outputs.values() for each in one.outputs)
        self._length.measured(rows, length, drafted, generated, time.perf_counter() - self._begun_s)
        if drafted and outputs:
            next(iter(outputs.values())).scheduler_stats = _stats(rows, drafted, generated)
        return outputs

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        """Drafts of a worker, which makes none."""

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """A request ends; the group knows its tokens from now on."""
        of = _group(request)
        if of is not None:
            self._drafts.of(of[0]).extend(of[1], request.all_token_ids)
        return super()._free_request(request, *args, **kwargs)  # type: ignore[misc]

    def _draft(self) -> list[Any]:
        """Draft for the step that comes; returns the requests that got drafts."""
        self._chosen = None
        running = self.running
        if not running or self.waiting or any(r.num_computed_tokens != r.num_tokens - 1 for r in running):
            return []
        groups = [_group(request) for request in running]
        if not any(groups):
            return []
        self._chosen = length = self._length.choose(len(running))
        if not length:
            return []
        drafted = []
        for of, request in zip(groups, running, strict=True):
            room = min(length, request.max_tokens - request.num_output_tokens - 1)
            if of is None or room < 1:
                continue
            tokens, drafts = request.all_token_ids, self._drafts.of(of[0])
            drafts.extend(of[1], tokens)
            request.spec_token_ids = drafts.propose(tokens[max(0, len(tokens) - LONGEST) :], room)
            if request.spec_token_ids:
                drafted.append(request)
        return drafted


def _group(request: Any) -> tuple[str, str] | None:
    """The group and the trajectory of a request; None: there is no group, as for a probe."""
    sampling = request.sampling_params
    extra: Mapping[str, Any] = (sampling and sampling.extra_args) or {}
    found = extra.get(GROUP)
    return None if found is None else (found[0], found[1])


def _stats(rows: int, drafted: int, generated: int) -> Any:
    from vllm.v1.metrics.stats import SchedulerStats
    from vllm.v1.spec_decode.metrics import SpecDecodingStats

    found = SpecDecodingStats(1, num_drafts=rows, num_draft_tokens=drafted, num_accepted_tokens=generated - rows)
    return SchedulerStats(spec_decoding_stats=found)
