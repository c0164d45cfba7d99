"""The state of a replica: its model, its optimizer, and the steps taken.

1. With a ``master_dtype`` the optimizer's weights are `libra.train.weight_copies.MasterWeights`,
   and the model has them rounded. With ``lora_rank`` they are `LowRankWeights`, and the model has
   them merged.
2. Weights change only in `ReplicaState.apply_gradient`, `take_weights`, `restore` and
   `libra.train.checkpoint`, which all mark the hybrids' weights as outdated.
"""

from __future__ import annotations

import copy
import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from libra.errors import TrainError
from libra.heads import score_alone
from libra.tensors import digest, untied
from libra.train.hybrid_pool import TIMEOUT_S, HybridPool
from libra.train.replica_group import (
    TrainGroup,
    checkpoint_activations,
    is_sharded,
    local,
    part_of,
    release,
    shard,
    whole,
)
from libra.train.replica_settings import TrainSettings
from libra.train.slice_gradient import SliceGradient
from libra.train.step_report import StepReport, Tally
from libra.train.weight_copies import LowRankWeights, MasterWeights, MovingAverage

logger = logging.getLogger(__name__)

_SAME_RESULT = {
    "layout", "gradient_checkpointing", "max_row_tokens", "micro_batch_tokens", "logit_chunk_tokens",
    "share_prompts",
}  # fmt: skip
"""Settings in which two replicas may differ and compute the same gradient."""


class ReplicaState:
    """The state of a `libra.train.replica.Replica`; ``model`` is on its device and not sharded yet.

    ``hybrids`` is set on rank 0 by `admit_hybrids`; ``average`` with ``trainer.old_logp=ewma``;
    ``content`` is the digest of the current weights, if known. ``before_change`` is called with the
    number of a step that is about to change the weights; it waits until no other thread reads the
    weights, and returns the seconds waited.
    """

    def __init__(
        self, model: Any, gradient: SliceGradient, *, master_dtype: torch.dtype | None, seed: int, base_dir: Path
    ) -> None:
        self.model, self.gradient, self.seed, self.base_dir = model, gradient, seed, base_dir
        self.hybrids: HybridPool | None = None
        self.steps_done = 0
        self.last_report: StepReport | None = None
        self.content: str | None = None
        self.before_change: Callable[[int], float] = lambda step: 0.0
        self._scored: Any = None
        self._aliases = untied(model.state_dict())[1]
        settings = gradient.settings
        if settings.gradient_checkpointing:
            checkpoint_activations(model)
        if self.is_sharded:
            shard(model, self.group, offload=settings.layout == "fsdp2_offload")
        self.average: MovingAverage | None = None
        if settings.old_logp == "ewma":
            self.average = MovingAverage(self.tensors(), settings.ewma_decay)
        self.master: MasterWeights | LowRankWeights | None = None
        if settings.lora_rank is not None:
            dtype, args = master_dtype or self.dtype, settings.lora_args
            self.master = LowRankWeights(
                model, rank=settings.lora_rank, alpha=args["alpha"], targets=args["targets"], dtype=dtype, seed=seed
            )
        elif master_dtype is not None and master_dtype.itemsize > self.dtype.itemsize:
            self.master = MasterWeights(self.parameters(), master_dtype)
        adam = {name: settings.adam_args[name] for name in ("betas", "weight_decay")}
        self.optimizer = torch.optim.AdamW(self.optimized().values(), lr=settings.lr, fused=True, **adam)

    @property
    def settings(self) -> TrainSettings:
        return self.gradient.settings

    @property
    def group(self) -> TrainGroup:
        """The replicas that take each step together; each epoch has a new group."""
        return self.gradient.group

    @group.setter
    def group(self, group: TrainGroup) -> None:
        self.gradient.group = group

    @property
    def device(self) -> torch.device:
        return self.gradient.device

    @property
    def dtype(self) -> torch.dtype:
        return self.gradient.dtype

    @property
    def is_sharded(self) -> bool:
        """Whether tensors are in shards: passes and `weights` are then collectives."""
        return is_sharded(self.settings, self.group)

    def description(self) -> dict[str, Any]:
        """Facts (JSON-able) that replicas must share to compute slices of one minibatch."""
        settings = {name: value for name, value in self.settings.of_a_step().items() if name not in _SAME_RESULT}
        shapes = [f"{name} {list(parameter.shape)}" for name, parameter in self.parameters().items()]
        return {
            "dtype": str(self.dtype),
            "master_dtype": None if self.master is None else str(next(iter(self.optimized().values())).dtype),
            **{
                f"trainer.{name}": list(value) if isinstance(value, tuple) else value
                for name, value in settings.items()
            },
            "parameters": hashlib.sha256("\n".join(shapes).encode()).hexdigest(),
        }

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Trained parameters by name, tied parameters once."""
        return {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}

    def optimized(self) -> dict[str, torch.nn.Parameter]:
        """The tensors that the optimizer updates, by the names of `parameters`."""
        return self.parameters() if self.master is None else self.master.tensors

    def weights(self) -> dict[str, Tensor]:
        """The state dict to publish, tied tensors once: views that the next step changes. If the
        model is sharded: copies in host memory, and a collective of the group."""
        if not self.is_sharded:
            return self.tensors()
        # One at a time: a device that holds shards may not have room for the whole model.
        return {name: whole(tensor).cpu() for name, tensor in self.tensors().items()}

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of `weights` in their local layout, sharded or not."""
        state = self.model.state_dict()
        return {name: tensor.detach() for name, tensor in state.items() if name not in self._aliases}

    def all_weights(self) -> dict[str, Tensor]:
        """The tensors of `weights`, tied tensors under all their names."""
        own = self.weights()
        return own | {alias: own[name] for alias, name in self._aliases.items()}

    def score(self, token_ids: NDArray[np.integer]) -> NDArray[np.float32]:
        """Log-probability in nats of each token but the first (T - 1,), at temperature 1. May run
        beside the passes of a step only after `score_beside`."""
        return score_alone(self._scored or self.model, token_ids)

    def hashed(self) -> str:
        """The digest of the current weights, computed now if unknown."""
        if self.content is None:
            self.content = digest(self.weights())
        return self.content

    def score_beside(self) -> bool:
        """Allow `score` beside the passes of later steps; False if the model cannot be copied. A
        copy of the modules then scores with the same weights, and with its own hooks and
        buffers."""
        saved = self.model.state_dict().keys()
        buffers = (buffer for name, buffer in self.model.named_buffers() if name in saved)
        try:
            self._scored = copy.deepcopy(self.model, {id(each): each for each in (*self.model.parameters(), *buffers)})
        except (TypeError, RuntimeError) as error:  # what cannot be pickled, or a tensor with a history
            logger.warning(
                "versions are published before the next step, not beside it: the model cannot be copied: %s", error
            )
            return False
        return True

    def take_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Replace weights, named as in `weights`; keep optimizer state and step count."""
        self.content = None
        with torch.no_grad(), self.undisturbed():
            for name, tensor in self.tensors().items():
                local(tensor).copy_(part_of(weights[name], tensor))
            if self.master is not None:
                self.master.take_from_model()
            self.weights_moved()

    def apply_gradient(self, step: int, tally: Tally) -> None:
        """Clip the gradient and take one optimizer step; TrainError if not finite."""
        parameters = self.optimized()
        norm = whole(torch.nn.utils.get_total_norm([p.grad for p in parameters.values() if p.grad is not None]))
        if not bool(torch.isfinite(norm)):
            bad = [n for n, p in parameters.items() if p.grad is not None and not bool(torch.isfinite(p.grad).all())]
            raise TrainError(
                f"train step {step}: the gradient is not finite (norm {float(norm)}; {len(bad)} of {len(parameters)} "
                f"parameters, first {bad[:3]}); weights remain at version {step}"
            )
        torch.nn.utils.clip_grads_with_norm_(parameters.values(), self.settings.adam_args["max_grad_norm"], norm)
        self.optimizer.step()
        if self.master is not None:
            self.master.round_into_model()
        self.optimizer.zero_grad(set_to_none=True)
        tally.add(grad_norm=float(norm), optimizer_steps=1)
        tally.stepped = True
        self.weights_moved()

    def backup(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Copies of the optimizer's weights and state, for `restore`."""
        weights = {name: parameter.detach().clone() for name, parameter in self.optimized().items()}
        return weights, copy.deepcopy(self.optimizer.state_dict())

    def restore(self, weights: Mapping[str, Tensor], optimizer_state: dict[str, Any]) -> None:
        with torch.no_grad():
            for name, parameter in self.optimized().items():
                parameter.copy_(weights[name])
        if self.master is not None:
            self.master.round_into_model()
        self.weights_moved()
        self.optimizer.load_state_dict(optimizer_state)

    def admit_hybrids(self, token: str, *, host: str = "127.0.0.1", timeout_s: float = TIMEOUT_S) -> HybridPool:
        """Let hybrid replicas that know ``token`` join; on rank 0 of the group, between steps."""
        source = None if self.is_sharded else self.weights
        self.hybrids = HybridPool(token, self.description(), source=source, host=host, timeout_s=timeout_s)
        return self.hybrids

    def undisturbed(self) -> AbstractContextManager[Any]:
        """Within this context, no thread copies the weights for a hybrid."""
        return nullcontext() if self.hybrids is None else self.hybrids.undisturbed()

    def weights_moved(self) -> None:
        if self.hybrids is not None:
            self.hybrids.stale = True

    def offer_weights(self) -> None:
        """Copy the weights for hybrids to pull; a collective if the weights are sharded."""
        weights = self.weights()
        if self.hybrids is not None:
            self.hybrids.publish(weights)

    @contextmanager
    def lending(self) -> Iterator[Callable[[Mapping[str, Tensor]], None]]:
        """Yields a function that replaces the model's weights; its own return, bit for bit."""
        self.before_change(self.steps_done)
        own = {name: local(tensor).clone() for name, tensor in self.tensors().items()}
        try:
            yield self._put
        finally:
            self._put(own)

    @torch.no_grad()
    def _put(self, weights: Mapping[str, Tensor]) -> None:
        for name, tensor in self.tensors().items():
            if name in weights:
                local(tensor).copy_(weights[name])
        release(self.model)

    def synchronise(self) -> int:
        """Give every replica of a new group the state with most steps; returns the steps taken. A
        collective, for replicas that hold the whole model; it sends nothing if all states are
        equal."""
        assert not self.is_sharded, "no other rank has a shard that was lost"
        group, parameters = self.group, self.optimized()
        facts = group.gather([self.steps_done, digest(self.weights())])
        steps = max(taken for taken, _ in facts)
        source = next(rank for rank, (taken, _) in enumerate(facts) if taken == steps)
        if all(fact == facts[source] for fact in facts):
            return steps
        logger.info("ranks are at steps %s: all take the state of rank %d", [taken for taken, _ in facts], source)
        held = [name for name, parameter in parameters.items() if self.optimizer.state.get(parameter)]
        report = None if self.last_report is None else self.last_report.as_dict()
        held, report = group.gather([held, report] if group.rank == source else None)[source]
        if group.rank != source:
            self.optimizer.state.clear()
            for name in held:
                own = parameters[name].detach()
                step = torch.zeros((), dtype=torch.float32, device=own.device)
                moments = {"exp_avg": torch.zeros_like(own), "exp_avg_sq": torch.zeros_like(own)}
                self.optimizer.state[parameters[name]] = {"step": step, **moments}
        group.send_(list(self.tensors().values()), source)
        if self.master is not None:
            group.send_([tensor.detach() for tensor in self.master.tensors.values()], source)
        states = [self.optimizer.state[parameters[name]] for name in held]
        group.send_([state[key] for key in ("step", "exp_avg", "exp_avg_sq") for state in states], source)
        if group.rank != source:
            self.steps_done, self.content = steps, None
            self.last_report = None if report is None else StepReport(**report)
        return steps
