"""What vLLM's workers do with drafts: sample after each of them as without drafts, and keep those that equal the sampled tokens.

vLLM's own test of drafts ("rejection sampling") draws other random numbers than a request without drafts, and its form for CPUs
is broken: a request's temperature is expanded into a copy that is thrown away, and log-probabilities become NaN. It is not used.

Only vLLM's processes import it. Shapes: R requests, T rows of logits, one per drafted token and one more per request;
W the longest draft and one.

Invariants
----------
1. Row j of a request is drawn from the request's own generator, as its j-th next token would be, by vLLM's own sampler.
2. After a step the generator stands where it would stand without drafts: what rejected rows drew from it is taken back.
3. A token's log-probability is that of the distribution it was drawn from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.rejection_sampler import PLACEHOLDER_TOKEN_ID

from libra.rollout.vllm_draws import skip_draws


class NoDrafts:
    """vLLM's ``custom_class`` proposer, without which it schedules no drafts: it has none, the scheduler makes them."""

    def __init__(self, vllm_config: Any) -> None:
        """vLLM makes it."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """There is no model."""

    def propose(self, sampled_token_ids: Sequence[Sequence[int]], *args: Any, **kwargs: Any) -> list[list[int]]:
        """No drafts for each request."""
        return [[] for _ in sampled_token_ids]


class RankProcesses(MultiprocExecutor):
    """vLLM's executor over processes, without asking them for drafts after every step."""

    def take_draft_token_ids(self) -> None:
        """They have none."""


class CoupledSampler(torch.nn.Module):
    """In place of a model runner's rejection sampler."""

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self._runner = runner

    def forward(self, metadata: Any, draft_probs: Any, logits: Tensor, sampling: Any) -> SamplerOutput:
        """Tokens (R, longest draft + 1), `PLACEHOLDER_TOKEN_ID` after those that are kept, with their log-probabilities."""
        sampler = self._runner.sampler
        if metadata.max_spec_len == 0:
            found: SamplerOutput = sampler(logits=logits, sampling_metadata=sampling)
            return found
        check_sampling(sampling)
        rows = [count + 1 for count in metadata.num_draft_tokens]
        begins = [sum(rows[:index]) for index in range(len(rows))]
        before = {
            index: _place(generator)
            for index, generator in sampling.generators.items()
            if metadata.num_draft_tokens[index]
        }
        output = sampler(logits=logits, sampling_metadata=expanded(sampling, rows, begins))
        tokens, drafts = output.sampled_token_ids[:, 0].tolist(), metadata.draft_token_ids.tolist()
        kept, drafted = [], 0
        for begin, count in zip(begins, metadata.num_draft_tokens, strict=True):
            kept.append(num_kept(tokens[begin : begin + count], drafts[drafted : drafted + count]))
            drafted += count
        for index, place in before.items():
            if kept[index] < rows[index]:
                generator = sampling.generators[index]
                _back_to(generator, place)
                skip_draws(generator, kept[index], self._runner)
        return _padded(output, begins, kept, max(rows))


def num_kept(sampled: Sequence[int], drafts: Sequence[int]) -> int:
    """How many of a request's rows give a token: those up to the first whose token differs from its draft, that one included."""
    for place, (token, draft) in enumerate(zip(sampled, drafts, strict=True)):
        if token != draft:
            return place + 1
    return len(drafts) + 1


def expanded(sampling: Any, rows: Sequence[int], begins: Sequence[int]) -> Any:
    """Sampling metadata with an entry for each row; a request's generator serves its rows in order."""

    def of_rows(given: Tensor | None) -> Tensor | None:
        return None if given is None else torch.repeat_interleave(given, counts.to(given.device))

    counts = torch.tensor(rows)
    return replace(
        sampling,
        temperature=of_rows(sampling.temperature),
        top_p=of_rows(sampling.top_p),
        top_k=of_rows(sampling.top_k),
        generators={
            begins[index] + place: generator
            for index, generator in sorted(sampling.generators.items())
            for place in range(rows[index])
        },
    )


def check_sampling(sampling: Any) -> None:
    """ValueError if a request has a setting that depends on its earlier tokens, for which rows of drafts have no place."""
    processors = [*sampling.logitsprocs.argmax_invariant, *sampling.logitsprocs.non_argmax_invariant]
    holder = sampling.thinking_budget_state_holder
    for name, given in (
        ("penalties", not sampling.no_penalties),
        ("bad_words", sampling.bad_words_token_ids),
        ("allowed_token_ids", sampling.allowed_token_ids_mask is not None),
        ("logprob_token_ids", sampling.logprob_token_ids),
        ("a logits processor", any(_is_active(each) for each in processors)),
        ("a thinking budget", holder is not None and holder.has_tracked_requests()),
    ):
        if given:
            raise ValueError(
                f"a request has {name}, which rollout.speculate does not have; type rollout.speculate=false"
            )


def _is_active(processor: Any) -> bool:
    """Whether a logits processor has a request; one that is not known counts as active."""
    states = [getattr(processor, name) for name in ("min_p_count", "biases", "min_toks") if hasattr(processor, name)]
    return not states or any(states)


def _place(generator: torch.Generator) -> Any:
    return generator.get_state() if generator.device.type == "cpu" else generator.get_offset()


def _back_to(generator: torch.Generator, place: Any) -> None:
    if generator.device.type == "cpu":
        generator.set_state(place)
    else:
        generator.set_offset(place)


def _padded(output: SamplerOutput, begins: Sequence[int], kept: Sequence[int], width: int) -> SamplerOutput:
    """Rows (T) as (R, width); vLLM leaves out the log-probabilities of placeholders."""
    sampled = output.sampled_token_ids
    begin_R1, kept_R1, place_W = torch.tensor(begins)[:, None], torch.tensor(kept)[:, None], torch.arange(width)
    beyond = (place_W >= kept_R1).to(sampled.device)
    flat = (begin_R1 + torch.minimum(place_W, kept_R1 - 1)).flatten().to(sampled.device)
    tokens = sampled[flat, 0].view(len(kept), width).masked_fill(beyond, PLACEHOLDER_TOKEN_ID)
    given = output.logprobs_tensors
    if given is not None:
        given = LogprobsTensors(given.logprob_token_ids[flat], given.logprobs[flat], given.selected_token_ranks[flat])
    return SamplerOutput(sampled_token_ids=tokens, logprobs_tensors=given)
