"""The part of a trajectory that a training step reads, and batches fetched from other workers.

A `LazyBatch` has lengths and advantages at once; tokens are fetched slice by slice.

1. A step on a lazy batch is the step on its trajectories, bit for bit: slices are computed from the
   announced lengths; a sample that arrives with another length is a TrainError.
2. A row is fetched at most once, and only for a slice of this replica or of a hybrid that it feeds.

Shape legend: T tokens of a trajectory, A actions of it, L layers, K columns (tokens of the
vocabulary) or experts of each token, N action tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from libra.errors import TrainError
from libra.types import Taught, Trajectory, start_of


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """The tokens before a trajectory's last action token, and the actions to score."""

    token_ids: NDArray[np.int64]  # (T,) inputs; later tokens do not influence the loss
    action_at: NDArray[np.int64]  # (A,) positions of inputs whose *next* token is an action
    target: NDArray[np.int64]  # (A,) the next token
    behaviour_logp: NDArray[np.float32]  # (A,) as the engine recorded it; never written
    current: NDArray[np.bool_]  # (A,) whether token and KV cache are of the version now being trained
    advantage: float
    proximal_logp: NDArray[np.floating] | None = None  # (A,) under the weights at the start of the step, if computed
    kept: NDArray[np.bool_] | None = None  # (A,) False where a choice over the whole minibatch leaves the token out
    turn_at: NDArray[np.int64] = field(
        default_factory=lambda: np.zeros(0, np.int64)
    )  # last input before each generation
    version: NDArray[np.int32] = field(
        default_factory=lambda: np.zeros(0, np.int32)
    )  # (A,); -1: KV cache of another version
    reward: float = 0.0
    group: tuple[int, int] = (0, 0)  # iteration and group of the trajectory
    token_advantage: NDArray[np.float64] | None = None  # (A,) replaces ``advantage`` where tokens have rewards
    counted: bool = True  # False for a late correction, which counts in no denominator
    engines: tuple[str, ...] = ()  # the worker that ended each generation
    name: str = ""
    routes: NDArray[np.int16] | None = None  # (T, L, K) experts chosen by the engine; -1: not recorded
    taught: Taught | None = None  # a teacher's log-probabilities of the actions
    starts: tuple[int, ...] = ()  # of further sequences, at which attention ends; all count as one sequence

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def advantages(self) -> NDArray[np.float64]:
        """Advantage of each action (A,)."""
        return np.full(self.num_actions, self.advantage) if self.token_advantage is None else self.token_advantage

    @property
    def has_advantage(self) -> bool:
        """Whether the advantage of any action differs from 0."""
        return self.advantage != 0 if self.token_advantage is None else bool(self.token_advantage.any())

    @property
    def num_prompt_tokens(self) -> int:
        """Inputs before the first action: the part that samples of a group share."""
        return int(self.action_at[0]) + 1

    @property
    def num_actions(self) -> int:
        return len(self.target)

    def only(self, at: NDArray[np.intp]) -> Sample:
        """The actions ``at`` of this sample, with the tokens up to the last of them."""
        end = self.action_at[at[-1]]
        return replace(
            self,
            token_ids=self.token_ids[: end + 1],
            action_at=self.action_at[at],
            target=self.target[at],
            behaviour_logp=self.behaviour_logp[at],
            current=self.current[at],
            version=self.version[at],
            proximal_logp=None,
            kept=None,
            starts=tuple(start for start in self.starts if start <= end),
        )


def sample_of(trajectory: Trajectory, version: int) -> Sample:
    """The sample of ``trajectory`` for the step that trains weights ``version``. TrainError if the
    advantage or a behaviour log-probability is not finite, nothing was generated, the first token
    is an action, or arrays differ in length."""
    name = f"trajectory {trajectory.trajectory_id}"
    where = np.flatnonzero(trajectory.is_action)
    columns = ("token_ids", "is_action", "behaviour_logprob", "weight_version", "kv_version", "routes")
    lengths = {each: len(found) for each in columns if (found := getattr(trajectory, each)) is not None}
    if len(set(lengths.values())) != 1:
        raise TrainError(f"{name}: its arrays differ in length: {lengths}")
    if not len(where) or where[0] == 0:
        got = "its first token is an action" if len(where) else "no generated token"
        raise TrainError(f"{name}: {got}; a trajectory trains only with a prompt and a generated token after it")
    if not np.isfinite(trajectory.advantage):
        raise TrainError(f"{name}: advantage is {trajectory.advantage}; it must be one finite number")
    behaviour_logp = trajectory.behaviour_logprob[where]
    if not np.isfinite(behaviour_logp).all():
        at = int(where[~np.isfinite(behaviour_logp)][0])
        raise TrainError(f"{name}: behaviour_logprob of token {at} is {trajectory.behaviour_logprob[at]}, not finite")
    token_ids = trajectory.token_ids.astype(np.int64)
    begun = [turn for turn in trajectory.turns if "prompt_tokens" in turn]
    begun.sort(key=lambda turn: start_of(turn) + int(turn["prompt_tokens"]))
    made_by, kept_by = trajectory.weight_version[where], trajectory.kv_version[where]
    return Sample(
        token_ids=token_ids[: where[-1]],
        action_at=where - 1,
        target=token_ids[where],
        behaviour_logp=behaviour_logp.astype(np.float32),
        current=(made_by == version) & (kept_by == version),
        version=np.where(made_by == kept_by, made_by, -1).astype(np.int32),
        advantage=float(trajectory.advantage),
        reward=float(trajectory.reward),
        group=(trajectory.trajectory_id.iteration, trajectory.trajectory_id.group),
        counted=trajectory.counted,
        turn_at=np.array([start_of(turn) + turn["prompt_tokens"] - 1 for turn in begun], np.int64),
        starts=tuple(start for start in trajectory.starts if start < where[-1]),
        engines=tuple(str(turn.get("worker", "")) for turn in begun),
        name=str(trajectory.trajectory_id),
        routes=None if trajectory.routes is None else trajectory.routes[: where[-1]],
        taught=_taught(trajectory, len(where)),
    )


def _taught(trajectory: Trajectory, num_actions: int) -> Taught | None:
    taught = trajectory.taught
    if taught is None or not trajectory.counted:
        return None
    if {len(each) for each in taught if each is not None} != {num_actions}:
        raise TrainError(
            f"trajectory {trajectory.trajectory_id}: the teacher scored {len(taught.own_logp)} tokens, and {num_actions} "
            "were generated; its scores are of another trajectory"
        )
    return taught


@dataclass(frozen=True, slots=True, eq=False)
class TaughtTokens:
    """Teacher scores of action tokens: columns int64 and log-probabilities, as in
    `libra.types.Taught`. ``known_N`` is whether the teacher scored the token's sequence."""

    columns_NK: Tensor
    logp_NK: Tensor
    known_N: Tensor
    rest_N: Tensor | None = None
    old_NK: Tensor | None = None

    def to(self, device: torch.device) -> TaughtTokens:
        here = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: value.to(device) for name, value in here.items() if value is not None})


def taught_tokens(samples: Sequence[Sample], dtype: torch.dtype) -> TaughtTokens | None:
    """Teacher log-probabilities of all actions of ``samples``; None if no sample has them.
    TrainError if samples differ in the number of columns."""
    known = [sample.taught for sample in samples if sample.taught is not None]
    if not known:
        return None
    if len(shapes := {(each.logp.shape[1], each.rest_logp is None, each.old_logp is None) for each in known}) != 1:
        raise TrainError(f"teacher: the scores in one batch are of several kinds: {sorted(shapes)}")
    first, width = known[0], known[0].logp.shape[1]

    def joined(name: str, fill: float, *shape: int) -> Tensor:
        parts = [
            np.full((sample.num_actions, *shape), fill) if sample.taught is None else getattr(sample.taught, name)
            for sample in samples
        ]
        return torch.from_numpy(np.concatenate(parts))

    return TaughtTokens(
        columns_NK=joined("token_ids", 0, width).to(torch.int64),
        logp_NK=joined("logp", 0.0, width).to(dtype),
        known_N=torch.from_numpy(np.repeat([s.taught is not None for s in samples], [s.num_actions for s in samples])),
        rest_N=None if first.rest_logp is None else joined("rest_logp", -1.0).to(dtype),
        old_NK=None if first.old_logp is None else joined("old_logp", 0.0, width).to(dtype),
    )


Fetch = Callable[[Sequence[str]], Sequence[Trajectory]]
"""Trajectories of rows by name, in that order, without advantages; or TrainError."""
_NONE, _NO_LOGP, _NO_FLAGS = np.zeros(0, np.int64), np.zeros(0, np.float32), np.zeros(0, np.bool_)


@dataclass(frozen=True, slots=True)
class RowFacts:
    """The row of a trajectory that trains, with lengths and advantage of its `Sample`."""

    row: str
    num_tokens: int
    num_actions: int
    advantage: float
    counted: bool = True


class LazyBatch:
    """A batch's trajectories for `Replica.step`, fetched on demand. ``facts`` are of trajectories
    that train, in batch order; ``num_trajectories`` counts all."""

    def __init__(self, facts: Sequence[RowFacts], num_trajectories: int, fetch: Fetch) -> None:
        self.facts = facts
        self.num_trajectories = num_trajectories
        self.fetched: dict[str, Sample] = {}
        self._fetch = fetch

    def __len__(self) -> int:
        return self.num_trajectories

    def samples(self, step: int) -> list[Sample]:
        """One placeholder for each sample, which `present` replaces."""
        return [_Absent.of(fact, self, step) for fact in self.facts]

    def get(self, absent: Sequence[_Absent]) -> None:
        """Fetch the samples of rows that are not in `fetched` yet."""
        missing = [sample for sample in absent if sample.fact.row not in self.fetched]
        for sample, trajectory in zip(missing, self._fetch([sample.fact.row for sample in missing]), strict=True):
            fact = sample.fact
            trajectory.advantage, trajectory.counted = fact.advantage, fact.counted
            arrived = sample_of(trajectory, sample.step)
            if (arrived.num_tokens, arrived.num_actions) != (fact.num_tokens, fact.num_actions):
                raise TrainError(
                    f"trajectory {trajectory.trajectory_id}: it has {arrived.num_tokens} tokens and {arrived.num_actions} "
                    f"actions; {fact.num_tokens} and {fact.num_actions} were announced"
                )
            self.fetched[fact.row] = arrived


@dataclass(frozen=True, slots=True, eq=False)
class _Absent(Sample):
    fact: RowFacts = RowFacts("", 0, 0, 0.0)
    batch: LazyBatch | None = None
    step: int = -1

    @classmethod
    def of(cls, fact: RowFacts, batch: LazyBatch, step: int) -> _Absent:
        return cls(
            _NONE,
            _NONE,
            _NONE,
            _NO_LOGP,
            _NO_FLAGS,
            fact.advantage,
            counted=fact.counted,
            fact=fact,
            batch=batch,
            step=step,
        )

    @property
    def num_tokens(self) -> int:
        return self.fact.num_tokens

    @property
    def num_actions(self) -> int:
        return self.fact.num_actions


def samples_of(batch: Sequence[Trajectory] | LazyBatch, step: int, *, whole: bool) -> list[Sample]:
    """The samples of a batch for step ``step``; placeholders of a lazy batch unless ``whole``."""
    if isinstance(batch, LazyBatch):
        samples = batch.samples(step)
        return present(samples) if whole else samples
    trained = (trajectory for trajectory in batch if trajectory.failure.trains)
    return [sample_of(trajectory, step) for trajectory in trained if trajectory.num_action_tokens]


def present(samples: Sequence[Sample]) -> list[Sample]:
    """``samples``, with all placeholders fetched at once."""
    absent = [sample for sample in samples if isinstance(sample, _Absent)]
    if not absent:
        return list(samples)
    batch = absent[0].batch
    assert batch is not None and all(sample.batch is batch for sample in absent), "a step has one batch"
    batch.get(absent)
    return [batch.fetched[sample.fact.row] if isinstance(sample, _Absent) else sample for sample in samples]
