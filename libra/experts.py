"""Routers of a mixture of experts: their choices for each token, and the replay of choices.

Engine and trainer round differently and may choose different experts for a token, which changes its
log-probability much more than rounding. So an engine records its *routes*, and the trainer replays
them (Rollout Routing Replay, R3, arXiv:2510.11370) with weights of its own router, with gradient.
Differs from the paper: prompts are replayed too, and a place without a record keeps its own choice.

Shape legend: P places of a forward pass, L layers with experts, K experts per token, E experts.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from libra.errors import ModelError

KNOWN_ROUTERS: Final = ("Qwen3MoeTopKRouter",)
"""Classes whose output is (logits, weights, experts).

Weights are the softmax over all experts, divided by their sum if ``norm_topk_prob``.
"""
UNKNOWN: Final = -1
"""Stands for an expert that is not recorded."""


def routers_of(model: Any) -> list[Any]:
    """The routers of a model by layer; ModelError if it has none of a known kind."""
    found = [module for module in model.modules() if type(module).__name__ in KNOWN_ROUTERS]
    if not found:
        raise ModelError(
            f"trainer.routes: {model.config.model_type} has no routers of a known kind ({', '.join(KNOWN_ROUTERS)}), so no routes "
            "can be recorded or replayed; type trainer.routes=recompute"
        )
    return found


class Routers:
    """The routers of a qwen3_moe model, by hooks: recording while it serves, replaying while it
    trains. With ``listen``, the experts of each pass are kept for `take`."""

    def __init__(self, model: Any, *, listen: bool = False) -> None:
        self.modules = routers_of(model)
        self.num_experts, self.top_k = int(self.modules[0].num_experts), int(self.modules[0].top_k)
        self._listen = listen
        self._heard: dict[int, Tensor] = {}
        self._wanted: Tensor | None = None
        self._equal: list[Tensor] = []  # of each layer since `compared`: places replayed, and with the same experts
        for layer, module in enumerate(self.modules):
            module.register_forward_hook(partial(self._after, layer))

    @property
    def shape(self) -> tuple[int, int]:
        """(L, K)."""
        return len(self.modules), self.top_k

    def replay(self, routes_PLK: Tensor | None) -> None:
        """Choose these experts in all later passes, recomputed passes included; None ends that."""
        if routes_PLK is not None and tuple(routes_PLK.shape[1:]) != self.shape:
            raise ModelError(
                f"trainer.routes: routes of {tuple(routes_PLK.shape[1:])} (layers, experts per token) were recorded where the "
                f"model has {self.shape}; they are of another model"
            )
        self._wanted, self._equal = routes_PLK, []

    def compared(self) -> tuple[int, int]:
        """Places and layers replayed by the last pass, and how many agreed with the routers."""
        if not self._equal:
            return 0, 0
        replayed, equal = torch.stack(self._equal[: len(self.modules)]).sum(0).tolist()
        return int(replayed), int(equal)

    def take(self) -> Tensor:
        """The experts of the last pass (P, L, K)."""
        return torch.stack([self._heard[layer] for layer in range(len(self.modules))], 1)

    def _after(self, layer: int, module: Any, _: Any, output: tuple[Tensor, Tensor, Tensor]) -> Any:
        logits_PE, weights_PK, experts_PK = output
        if self._listen:
            self._heard[layer] = experts_PK
        if self._wanted is None:
            return None
        wanted_PK = self._wanted[:, layer].to(experts_PK)
        if wanted_PK.shape != experts_PK.shape:
            raise ModelError(
                f"trainer.routes: routes of {len(wanted_PK)} places for a pass of {len(experts_PK)}; please report this"
            )
        known_P1 = (wanted_PK >= 0).all(-1, keepdim=True)
        if len(self._equal) < len(self.modules):  # not of a pass that recomputes activations
            same_P1 = (wanted_PK.sort(-1).values == experts_PK.sort(-1).values).all(-1, keepdim=True)
            self._equal.append(torch.stack([known_P1.sum(), (known_P1 & same_P1).sum()]))
        experts_PK = torch.where(known_P1, wanted_PK, experts_PK)
        probabilities_PE = torch.softmax(logits_PE, dim=-1, dtype=torch.promote_types(logits_PE.dtype, torch.float32))
        chosen_PK = probabilities_PE.gather(1, experts_PK)
        if module.norm_topk_prob:
            chosen_PK = chosen_PK / chosen_PK.sum(-1, keepdim=True)
        return logits_PE, chosen_PK.to(weights_PK.dtype), experts_PK
