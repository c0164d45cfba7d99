"""The part of a trajectory that a training step computes with."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from libra.errors import TrainError
from libra.types import Taught, Trajectory, start_of


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """The tokens before a trajectory's last action token, and the actions to score.

    Tokens after the last action token (a final observation) do not influence the loss and are left out.

    Attributes
    ----------
    token_ids : int64 array (T,)
        Inputs.
    action_at : int64 array (A,)
        Positions of inputs whose *next* token is an action.
    target : int64 array (A,)
        That next token.
    behaviour_logp : float32 array (A,)
        As the engine recorded it; read, never written.
    current : bool array (A,)
        Whether token and KV cache both come from the version now being trained.
    advantage : float
    proximal_logp : float array (A,), optional
        Under the weights at the start of the step, if the loss needs it and it has been computed.
    kept : bool array (A,), optional
        False where a choice over the whole minibatch leaves the token out of the loss.
    version : int array (A,)
        Weights that sampled the token; -1 where its KV cache is of others. Empty in a slice of another replica.
    reward : float
    group : (int, int)
        Iteration and group of the trajectory: samples of one prompt have the same.
    token_advantage : float array (A,), optional
        In place of ``advantage``, where tokens have rewards of their own.
    turn_at : int64 array
        Positions of inputs whose next token is the first of a generation.
    engines : tuple of str
        The worker that ended each of these generations.
    name : str
        Of the trajectory.
    routes : int16 array (T, L, K), optional
        Experts that the engine chose for each input, by layer; -1: not recorded.
    starts : tuple of int
        Positions at which further sequences of the trajectory begin, none for one sequence: an agent's conversation may have
        branches. Attention does not cross them; together they count as one trajectory.
    counted : bool
        False for a late correction of a trajectory that was trained before: it adds to the gradient of the policy loss alone,
        and counts in no denominator.
    taught : Taught, optional
        What a teacher says of the actions. None: it has not scored them.
    """

    token_ids: NDArray[np.int64]
    action_at: NDArray[np.int64]
    target: NDArray[np.int64]
    behaviour_logp: NDArray[np.float32]
    current: NDArray[np.bool_]
    advantage: float
    proximal_logp: NDArray[np.floating] | None = None
    kept: NDArray[np.bool_] | None = None
    turn_at: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    version: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    reward: float = 0.0
    group: tuple[int, int] = (0, 0)
    token_advantage: NDArray[np.float64] | None = None
    counted: bool = True
    engines: tuple[str, ...] = ()
    name: str = ""
    routes: NDArray[np.int16] | None = None
    taught: Taught | None = None
    starts: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Inputs."""
        return len(self.token_ids)

    @property
    def advantages(self) -> NDArray[np.float64]:
        """Of each action (A,)."""
        return np.full(self.num_actions, self.advantage) if self.token_advantage is None else self.token_advantage

    @property
    def has_advantage(self) -> bool:
        """Whether any action has one that is not 0."""
        return self.advantage != 0 if self.token_advantage is None else bool(self.token_advantage.any())

    @property
    def num_prompt_tokens(self) -> int:
        """Inputs before the first action: the part that samples of a group have in common."""
        return int(self.action_at[0]) + 1

    @property
    def num_actions(self) -> int:
        """Tokens scored."""
        return len(self.target)


def sample_of(trajectory: Trajectory, version: int) -> Sample:
    """The sample of ``trajectory`` for the step that trains weights ``version``.

    Raises
    ------
    TrainError
        If the advantage or a behaviour log-probability is not finite, nothing was generated, the first token is an
        action (nothing predicts it), or arrays differ in length.
    """
    name = f"trajectory {trajectory.trajectory_id}"
    where = np.flatnonzero(trajectory.is_action)
    lengths = {len(trajectory.token_ids), len(trajectory.is_action), len(trajectory.behaviour_logprob)}
    if len(lengths | {len(trajectory.weight_version), len(trajectory.kv_version)}) != 1:
        raise TrainError(
            f"{name}: token_ids, is_action, behaviour_logprob and versions differ in length: {sorted(lengths)}"
        )
    if not len(where) or where[0] == 0:
        got = "its first token is an action" if len(where) else "no generated token"
        raise TrainError(
            f"{name}: {got}; a trajectory trains only with a prompt and at least one generated token after it"
        )
    if trajectory.routes is not None and len(trajectory.routes) != len(trajectory.token_ids):
        raise TrainError(f"{name}: routes of {len(trajectory.routes)} tokens; it has {len(trajectory.token_ids)}")
    if not np.isfinite(trajectory.advantage):
        raise TrainError(f"{name}: advantage is {trajectory.advantage}; allowed is one finite number")
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
    """What the teacher says of a trajectory that is not a late correction; TrainError if it is of another one."""
    taught = trajectory.taught
    if taught is None or not trajectory.counted:
        return None
    if {len(each) for each in taught if each is not None} != {num_actions}:
        raise TrainError(
            f"trajectory {trajectory.trajectory_id}: the teacher scored {len(taught.own_logp)} tokens, and {num_actions} were "
            "generated; its scores are of another trajectory"
        )
    return taught
