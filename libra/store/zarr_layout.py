"""The arrays of the trajectory store: names, types and meanings, and trajectories as rows.

Five levels, each a dimension: ``token`` (in the root group), ``turn``, ``trajectory``, ``score``
and ``route`` (in groups of that name). Trajectory i has ``length[i]`` tokens from ``offset[i]`` on,
and ``num_turns[i]`` turns from ``turn_offset[i]`` on.

A trajectory with A generated tokens and ``scores_per_token`` W has A x W rows in the level
``score``, from ``score_offset[i]`` on: for each generated token the token itself, the tokens that
the teacher scored there (``distil``), and with a top-k one row for all other tokens, with
``token_id`` -1. A trajectory of T tokens has T x ``route_layers`` x ``experts_per_token`` rows in
the level ``route``, from ``route_offset[i]`` on, the last index fastest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import zarr
from numpy.typing import NDArray

from libra.errors import StoreError
from libra.store.run_records import prompt_to_json
from libra.types import NO_TOOL, Taught, Trajectory, tool_outcome
from libra.untrusted import valid_unicode

_UNKNOWN: Mapping[str, int | float | bool] = {"i": -1, "f": float("nan"), "b": False}


@dataclass(frozen=True, slots=True)
class Column:
    """One array of a level."""

    name: str
    dtype: str
    meaning: str

    @property
    def unknown(self) -> int | float | str:
        """Value of an unknown entry: -1, NaN or the empty string."""
        return "" if self.dtype == "string" else _UNKNOWN[np.dtype(self.dtype).kind]

    def numpy_dtype(self) -> np.dtype[Any]:
        """The type of this column in memory."""
        return np.dtypes.StringDType() if self.dtype == "string" else np.dtype(self.dtype)


Further = Literal["score", "route"]
OTHERS = -1
"""Token id that stands for all tokens outside a top-k."""

SCORE = (
    Column(
        "token_id", "int32", "the generated token, then tokens that the teacher scored there; -1: all others of a top-k"
    ),
    Column("logp", "float32", "nats, log-probability by the teacher at the temperature of the run"),
    Column("student_logp", "float32", "nats, by the student as it generated; NaN: not known"),
)
ROUTE = (Column("expert", "int16", "expert chosen for a token in a layer; -1: not recorded"),)


def per_token(trajectory: Trajectory, level: Further) -> int:
    """Rows per generated token (level ``score``) or per token (``route``); 0 without such rows."""
    if level == "route":
        return 0 if trajectory.routes is None else int(np.prod(trajectory.routes.shape[1:]))
    taught = trajectory.taught
    if taught is None or not len(taught.own_logp):
        return 0
    return 1 + int(taught.logp.shape[1]) + (taught.rest_logp is not None)


def num_rows(trajectory: Trajectory, level: Level) -> int:
    """Rows that a trajectory has in a level."""
    tokens = len(trajectory.token_ids)
    match level:
        case "token":
            return tokens
        case "turn":
            return len(trajectory.turns)
        case "score":
            return trajectory.num_action_tokens * per_token(trajectory, level)
        case "route":
            return tokens * per_token(trajectory, level)
        case "trajectory":
            return 1


def score_rows(trajectories: Sequence[Trajectory]) -> dict[str, NDArray[Any]]:
    """The level ``score`` of trajectories; StoreError unless each generated token has a score."""
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
            f"{num_tokens}; each needs one score"
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
    """Teacher scores of a trajectory, from its rows of level ``score``; inverts `score_rows`."""
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
    """The level ``route`` of trajectories; StoreError unless each token has experts."""
    parts = [np.zeros(0, np.int16)]
    for each in trajectories:
        if each.routes is None:
            continue
        if each.routes.ndim != 3 or len(each.routes) != len(each.token_ids):
            raise StoreError(
                f"trajectory {each.trajectory_id}: routes are {each.routes.dtype}{each.routes.shape}; they must be "
                f"int16({len(each.token_ids)}, layers, experts per token)"
            )
        parts.append(each.routes.astype(np.int16, copy=False).ravel())
    return {"expert": np.concatenate(parts)}


SCHEMA = 4
"""Version of the layout of a store; another version is refused."""

Level = Literal["token", "turn", "trajectory", "score", "route"]
LEVELS: tuple[Level, ...] = ("token", "turn", "trajectory", "score", "route")
COUNTS: Mapping[Level, str] = {
    "token": "tokens",
    "turn": "turns",
    "trajectory": "trajectories",
    "score": "scores",
    "route": "routes",
}
"""Name of each level in the attribute ``committed`` of a store."""
OFFSETS: Mapping[Level, str] = {
    "token": "offset",
    "turn": "turn_offset",
    "score": "score_offset",
    "route": "route_offset",
}
"""The column with the first row of a trajectory in each other level."""
CHUNK_ROWS: Mapping[Level, int] = {"token": 32768, "turn": 4096, "trajectory": 1024, "score": 65536, "route": 262144}
"""Rows of one chunk. An append rewrites the last chunk of every array, so chunks are small
multiples of a batch."""
COMPRESSED: tuple[Level, ...] = ("token", "route")
"""Levels whose numbers are compressed; scores hardly shrink."""

TOKEN = (
    Column("token_ids", "int32", "prompt, generated and observed tokens in order"),
    Column("is_action", "bool", "whether the model generated this token"),
    Column("behaviour_logprob", "float32", "nats, of the distribution sampled from; 0 if not generated"),
    Column("weight_version", "int32", "version of the weights that generated the token; -1 if not generated"),
    Column("kv_version", "int32", "version of the weights that made the KV cache it attended to; -1 if not generated"),
)
TURN = (
    Column("trajectory", "int32", "row in the trajectory level"),
    Column("turn", "int32", "0-based"),
    Column("tool", "string", "name of the last tool called; empty: none"),
    Column(
        "status",
        "string",
        "outcome of its calls: ok, error, timeout, malformed, truncated; empty: no call, or none was made any more",
    ),
    Column("num_calls", "int32", "tool calls of this turn"),
    Column("prompt_tokens", "int32", "tokens of context before the generation"),
    Column("cached_tokens", "int32", "of these, tokens whose KV cache was there already"),
    Column("generated_tokens", "int32", "tokens generated"),
    Column("observation_tokens", "int32", "tokens read back from tools"),
    Column("stop_reason", "string", "why the generation ended: stop, length, abort"),
    Column("generate_s", "float64", "seconds from first forward pass to last token"),
    Column("queued_s", "float64", "seconds waited inside the engine"),
    Column("tool_s", "float64", "seconds in tools"),
    Column("worker", "string", "worker that generated"),
    Column("text_chars", "int32", "characters generated"),
    Column("payload_chars", "int32", "characters that the tools returned, before truncation"),
    Column(
        "sequence_start",
        "int32",
        "first token, counted in the trajectory, of the sequence that trains the turn; 0 but for agents with several conversations",
    ),
)
TRAJECTORY = (
    Column("split", "string", "train or eval"),
    Column("iteration", "int32", "iteration; of an eval trajectory the weight version"),
    Column("group", "int32", "group within the iteration"),
    Column("sample", "int32", "sample within the group"),
    Column("batch", "int32", "batch whose step consumed it; -1: none"),
    Column("epoch", "int32", "start of the run that wrote it"),
    Column("reward", "float64", "NaN if the failure class does not train"),
    Column("advantage", "float64", "as it entered the loss"),
    Column("end_reason", "string", "answered, length, max_turns, failure"),
    Column("failure", "string", "none, policy, tool, timeout, environment, reward, engine, worker"),
    Column("failure_detail", "string", "what went wrong, in words"),
    Column("attempt", "int32", "attempts that failed before this one"),
    Column("retried", "string", "their failure classes in order, joined by commas"),
    Column("prompt_id", "string", "name of the prompt"),
    Column("prompt_json", "string", "JSON object with messages and facts"),
    Column("offset", "int64", "first token"),
    Column("length", "int32", "number of tokens"),
    Column("turn_offset", "int64", "first turn"),
    Column("num_turns", "int32", "number of turns"),
    Column("oldest_version", "int32", "oldest weight version among generated tokens; -1: nothing generated"),
    Column("score_offset", "int64", "first row in the score level"),
    Column("scores_per_token", "int32", "rows there for each generated token; 0: its step had no score of a teacher"),
    Column("route_offset", "int64", "first row in the route level"),
    Column("route_layers", "int32", "layers with experts; 0: no experts were recorded"),
    Column("experts_per_token", "int32", "rows there for each token and layer"),
)
COLUMNS: Mapping[Level, tuple[Column, ...]] = {
    "token": TOKEN,
    "turn": TURN,
    "trajectory": TRAJECTORY,
    "score": SCORE,
    "route": ROUTE,
}

Rows = dict[Level, dict[str, NDArray[Any]]]
"""One array per column and level; the arrays of a level have equal lengths."""


def array_path(level: Level, name: str) -> str:
    """Path of an array within the store."""
    return name if level == "token" else f"{level}/{name}"


def is_compressed(level: Level, column: Column) -> bool:
    """Whether the chunks of a column are compressed."""
    return level in COMPRESSED or column.dtype == "string"


def create_arrays(group: zarr.Group) -> None:
    """Create every array, empty, in an empty group. Numeric columns of turns and trajectories are
    small; without compression an append costs half."""
    for level in LEVELS:
        for column in COLUMNS[level]:
            group.create_array(
                array_path(level, column.name),
                shape=(0,),
                chunks=(CHUNK_ROWS[level],),
                dtype=column.dtype,
                fill_value=column.unknown,
                compressors="auto" if is_compressed(level, column) else None,
                dimension_names=(level,),
                attributes={"meaning": column.meaning},
            )


def rows_of(trajectories: Sequence[Trajectory], *, first: Mapping[Level, int], batch: int) -> Rows:
    """Trajectories as columns, to be appended after the ``first`` rows of each level. Raises
    StoreError if arrays of a trajectory differ in length or kind, or a turn has an unknown
    field."""
    tokens: dict[str, NDArray[Any]] = {
        column.name: np.concatenate([_tokens(trajectory, column) for trajectory in trajectories])
        if trajectories
        else np.zeros(0, column.numpy_dtype())
        for column in TOKEN
    }
    turns = [
        _turn(turn, trajectory, first["trajectory"] + row)
        for row, trajectory in enumerate(trajectories)
        for turn in trajectory.turns
    ]
    rows = [_row(trajectory, batch) for trajectory in trajectories]
    for level, name in OFFSETS.items():
        counts = np.array([num_rows(trajectory, level) for trajectory in trajectories], np.int64)
        for row, offset in zip(rows, (first[level] + counts.cumsum() - counts).tolist(), strict=True):
            row[name] = offset
    further: Rows = {"score": score_rows(trajectories), "route": route_rows(trajectories)}
    return {"token": tokens, "turn": _columns(turns, TURN), "trajectory": _columns(rows, TRAJECTORY), **further}


def _tokens(trajectory: Trajectory, column: Column) -> NDArray[Any]:
    values = np.asarray(getattr(trajectory, column.name))
    if values.shape != trajectory.token_ids.shape or not np.can_cast(values.dtype, column.dtype, "same_kind"):
        raise StoreError(
            f"trajectory {trajectory.trajectory_id}: {column.name} is {values.dtype}{values.shape}; "
            f"it must be {column.dtype}{trajectory.token_ids.shape}, one entry per token"
        )
    return values.astype(column.dtype, copy=False)


def _row(trajectory: Trajectory, batch: int) -> dict[str, Any]:
    split_and_position = trajectory.trajectory_id._asdict()
    return split_and_position | {
        "batch": batch,
        "epoch": trajectory.epoch,
        "reward": trajectory.reward,
        "advantage": trajectory.advantage,
        "end_reason": str(trajectory.end_reason),
        "failure": str(trajectory.failure),
        "failure_detail": trajectory.failure_detail,
        "attempt": trajectory.attempt,
        "retried": trajectory.retried,
        "prompt_id": trajectory.prompt.prompt_id,
        "prompt_json": prompt_to_json(trajectory.prompt),
        "length": len(trajectory.token_ids),
        "num_turns": len(trajectory.turns),
        "oldest_version": trajectory.oldest_version,
        "scores_per_token": per_token(trajectory, "score"),
        "route_layers": 0 if trajectory.routes is None else trajectory.routes.shape[1],
        "experts_per_token": 0 if trajectory.routes is None else trajectory.routes.shape[2],
    }


def _turn(turn: Mapping[str, Any], trajectory: Trajectory, row: int) -> dict[str, Any]:
    if strangers := turn.keys() - {column.name for column in TURN}:
        raise StoreError(
            f"trajectory {trajectory.trajectory_id}: a turn has the fields {sorted(strangers)}, and the store has no "
            f"columns for them; allowed are {', '.join(column.name for column in TURN[1:])}"
        )
    try:
        tool_outcome(turn.get("status") or NO_TOOL)
    except ValueError as error:
        raise StoreError(f"trajectory {trajectory.trajectory_id}, turn {turn.get('turn')}: {error}") from error
    return {**turn, "trajectory": row}


def _columns(rows: Sequence[Mapping[str, Any]], columns: Sequence[Column]) -> dict[str, NDArray[Any]]:
    result = {}
    for column in columns:
        values = [column.unknown if (value := row.get(column.name)) is None else value for row in rows]
        if column.dtype == "string":
            values = [valid_unicode(value) if isinstance(value, str) else value for value in values]
        try:
            result[column.name] = np.array(values, dtype=column.numpy_dtype())
        except (TypeError, ValueError, OverflowError) as error:
            raise StoreError(f"column {column.name} ({column.dtype}): {error}") from error
    return result
