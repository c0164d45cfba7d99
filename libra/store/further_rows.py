"""What the store has of a trajectory beyond a number for each token: scores of a teacher, and experts of each layer.

Both are flat arrays. A trajectory with A generated tokens and ``scores_per_token`` W has A x W rows in the level ``score``: for
each generated token first that token, then those that the teacher scored there (``distil``), and with a top-k one more for all
others, whose ``token_id`` is -1. A trajectory of T tokens has T x ``route_layers`` x ``experts_per_token`` rows in the level
``route``, the last index fastest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from libra.errors import StoreError
from libra.store.stored_column import Column
from libra.types import Taught, Trajectory

Further = Literal["score", "route"]
FURTHER: tuple[Further, ...] = ("score", "route")
OTHERS = -1
"""In place of a token: all tokens that a top-k leaves out, together."""

SCORE = (
    Column(
        "token_id", "int32", "the generated token, then tokens that the teacher scored there; -1: all others of a top-k"
    ),
    Column("logp", "float32", "nats, log-probability by the teacher at the temperature of the run"),
    Column("student_logp", "float32", "nats, by the student as it generated; NaN: not known"),
)
ROUTE = (Column("expert", "int16", "expert chosen for a token in a layer; -1: not recorded"),)


def per_token(trajectory: Trajectory, level: Further) -> int:
    """Rows for each generated token (``score``) or for each token (``route``); 0: there are none."""
    if level == "route":
        return 0 if trajectory.routes is None else int(np.prod(trajectory.routes.shape[1:]))
    taught = trajectory.taught
    if taught is None or not len(taught.own_logp):
        return 0
    return 1 + int(taught.logp.shape[1]) + (taught.rest_logp is not None)


def num_further(trajectory: Trajectory, level: Further) -> int:
    """Rows that a trajectory has in a level."""
    tokens = len(trajectory.token_ids) if level == "route" else trajectory.num_action_tokens
    return tokens * per_token(trajectory, level)


def score_rows(trajectories: Sequence[Trajectory]) -> dict[str, NDArray[Any]]:
    """The level ``score`` of trajectories; StoreError if scores are not those of a trajectory's generated tokens."""
    parts = [_scores(each) for each in trajectories if per_token(each, "score")]
    return {
        column.name: np.concatenate([np.zeros(0, column.numpy_dtype()), *(part[column.name] for part in parts)])
        for column in SCORE
    }


def _scores(trajectory: Trajectory) -> dict[str, NDArray[Any]]:
    taught, action = trajectory.taught, trajectory.is_action
    assert taught is not None
    num_tokens = int(action.sum())
    if len(taught.own_logp) != num_tokens:
        raise StoreError(
            f"trajectory {trajectory.trajectory_id}: a teacher scored {len(taught.own_logp)} of its tokens, and it generated "
            f"{num_tokens}; allowed is a score for each"
        )
    drawn = np.full(taught.logp.shape, np.nan, np.float32) if taught.old_logp is None else taught.old_logp
    columns: dict[str, list[NDArray[Any]]] = {
        "token_id": [trajectory.token_ids[action, None], taught.token_ids],
        "logp": [taught.own_logp[:, None], taught.logp],
        "student_logp": [trajectory.behaviour_logprob[action, None], drawn],
    }
    if taught.rest_logp is not None:
        columns["token_id"].append(np.full((num_tokens, 1), OTHERS, np.int32))
        columns["logp"].append(taught.rest_logp[:, None])
        columns["student_logp"].append(np.full((num_tokens, 1), np.nan, np.float32))
    return {
        column.name: np.concatenate(columns[column.name], axis=1).astype(column.dtype, copy=False).ravel()
        for column in SCORE
    }


def taught_of(rows: Mapping[str, NDArray[Any]], scores_per_token: int) -> Taught:
    """What a teacher says of a trajectory, from its rows of the level ``score``; the inverse of `score_rows`."""
    token_ids, logp, student = (rows[column.name].reshape(-1, scores_per_token) for column in SCORE)
    with_rest = bool((token_ids[:, -1] == OTHERS).all())
    scored = slice(1, -1) if with_rest else slice(1, None)
    drawn = student[:, scored]
    return Taught(
        token_ids=np.ascontiguousarray(token_ids[:, scored]),
        logp=np.ascontiguousarray(logp[:, scored]),
        own_logp=np.ascontiguousarray(logp[:, 0]),
        rest_logp=np.ascontiguousarray(logp[:, -1]) if with_rest else None,
        old_logp=None if np.isnan(drawn).all() else np.ascontiguousarray(drawn),
    )


def route_rows(trajectories: Sequence[Trajectory]) -> dict[str, NDArray[Any]]:
    """The level ``route`` of trajectories; StoreError if experts are not those of a trajectory's tokens."""
    parts = [np.zeros(0, np.int16)]
    for each in trajectories:
        if each.routes is None:
            continue
        if each.routes.ndim != 3 or len(each.routes) != len(each.token_ids):
            raise StoreError(
                f"trajectory {each.trajectory_id}: routes are {each.routes.dtype}{each.routes.shape}; allowed is "
                f"int16({len(each.token_ids)}, layers, experts per token)"
            )
        parts.append(each.routes.astype(np.int16, copy=False).ravel())
    return {"expert": np.concatenate(parts)}
