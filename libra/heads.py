"""The end of a causal language model: its output head, and the operations on logits after it.

`at_head` gives the hidden states before the head, for logits of a few tokens at a time.
`after_head` runs the rest of the model (caps, scales) without its layers.

Shape legend: N tokens, C tokens of a chunk, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from libra.errors import ModelError

AfterHead = Callable[[Tensor], Tensor]
"""From the head's logits (C, V) to the model's logits."""


def at_head(model: Any, make: Callable[[Tensor], Tensor], **inputs: Any) -> Tensor:
    """``make`` applied to the hidden states (N, H) before the head of ``model``, rows flattened.

    ``make`` runs within the forward pass, while sharded weights are gathered. The model returns the
    result in place of its logits, through all its hooks: a sharded model needs them for its
    backward pass.
    """
    made: list[Tensor] = []

    def take(_: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        if made:  # ``make`` may run the end of the model
            return None
        hidden_NH = args[0].flatten(0, -2)
        none_0H = hidden_NH.new_empty(0, hidden_NH.shape[1])  # a slice would keep hidden_NH alive
        made.append(none_0H)
        made.append(make(hidden_NH))
        return (none_0H,)

    def give(_: Any, __: Any, output: Any) -> Any:
        if len(made) > 1:
            output.logits = made[-1]
        return output

    handles = [head_of(model).register_forward_pre_hook(take), model.register_forward_hook(give, prepend=True)]
    try:
        return model(**inputs).logits  # type: ignore[no-any-return]
    finally:
        for handle in handles:
            handle.remove()


def head_of(model: Any) -> torch.nn.Linear:
    """The output head of a transformers causal model; ModelError if it is not one linear map."""
    head = model.get_output_embeddings()
    if not isinstance(head, torch.nn.Linear):
        raise ModelError(
            f"model: the output head of {type(model).__name__} is {type(head).__name__}; it must be torch.nn.Linear: "
            "log-probabilities are computed a few tokens at a time, from its weight"
        )
    return head


def after_head(model: Any) -> AfterHead | None:
    """The operations of ``model`` on logits after its head, if any; ModelError if inseparable."""
    head = head_of(model)
    after = _end_of(model, head)
    weight = head.weight
    probe_1V = torch.linspace(-60, 60, head.out_features, device=weight.device, dtype=weight.dtype)[None]
    with torch.no_grad():
        return None if torch.equal(after(probe_1V), probe_1V) else after


def _end_of(model: Any, head: torch.nn.Linear) -> AfterHead:
    layers = model.base_model
    if layers is model:
        raise ModelError(
            f"model: {type(model).__name__} keeps its layers and its head in one module; its layers must be a module of their "
            "own (base_model_prefix)"
        )

    def after(logits_CV: Tensor) -> Tensor:
        hidden_1CH = logits_CV[None, :, :1]
        output = _OnlyHidden(hidden_1CH)
        with _forward(layers, lambda *_, **__: output), _forward(head, lambda *_, **__: logits_CV[None]):
            ids_1C = torch.zeros(hidden_1CH.shape[:2], dtype=torch.int64, device=logits_CV.device)
            return model.forward(input_ids=ids_1C, use_cache=False).logits[0]  # type: ignore[no-any-return]

    return after


class _OnlyHidden:
    def __init__(self, hidden_1CH: Tensor) -> None:
        self.last_hidden_state = hidden_1CH

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None


@contextmanager
def _forward(module: Any, instead: Callable[..., Any]) -> Iterator[None]:
    own = module.__dict__.get("forward")
    module.forward = instead
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own


CHUNK_TOKENS = 1024
"""Tokens whose logits are in memory at once; constant, as trainer and engine must agree."""


@torch.no_grad()
def score_alone(
    model: Any, token_ids: NDArray[np.integer], first: int = 1, temperature: float = 1.0
) -> NDArray[np.float32]:
    """Log-probability in nats of each token from ``first`` on (T - first,), float32. ``model`` is a
    transformers causal LM in evaluation mode with "sdpa"; ``first`` is at least 1."""
    ids = torch.from_numpy(np.asarray(token_ids, np.int64))
    ids = ids.to(next(model.parameters()).device)
    targets, head, after = ids[first:], head_of(model), after_head(model)

    def score(hidden_NH: Tensor) -> Tensor:
        wanted_NH = hidden_NH[first - 1 :]
        parts = []
        for at in range(0, len(wanted_NH), CHUNK_TOKENS):
            here = slice(at, at + CHUNK_TOKENS)
            logits_CV = torch.nn.functional.linear(wanted_NH[here], head.weight, head.bias)
            logits_CV = (logits_CV if after is None else after(logits_CV)).float()
            if temperature != 1.0:
                logits_CV = logits_CV / temperature
            parts.append(torch.log_softmax(logits_CV, dim=-1).gather(1, targets[here, None])[:, 0])
        return torch.cat(parts) if parts else wanted_NH.new_zeros(0)

    found: NDArray[np.float32] = at_head(model, score, input_ids=ids[None, :-1], use_cache=False).cpu().numpy()
    return found
