"""Trajectories to store, made from a seed."""

from dataclasses import fields

import numpy as np
import pytest

from libra.store.trajectory_store import TrajectoryStore
from libra.types import EndReason, FailureClass, Prompt, StopReason, Taught, Trajectory, TrajectoryId


def _turn(rng, turn):
    return {
        "turn": turn, "tool": str(rng.choice(["calculator", "python", ""])),
        "status": str(rng.choice(["ok", "error", ""])), "num_calls": int(rng.integers(3)),
        "prompt_tokens": int(rng.integers(1000)), "cached_tokens": int(rng.integers(1000)),
        "generated_tokens": int(rng.integers(64)), "observation_tokens": int(rng.integers(64)),
        "stop_reason": str(rng.choice(list(StopReason))), "generate_s": float(rng.random()),
        "queued_s": float(rng.random()), "tool_s": float(rng.random()), "worker": f"rollout-{rng.integers(4)}",
        "text_chars": int(rng.integers(200)), "payload_chars": int(rng.integers(200)), "sequence_start": 0,
    }  # fmt: skip


def _make(
    iteration=0, group=0, sample=0, split="train", *, seed=0, num_tokens=20, num_turns=2, scored=None, experts=None,
    **changes,
):  # fmt: skip
    rng = np.random.default_rng([seed, iteration, group, sample])
    action = rng.random(num_tokens) < 0.5
    values = {
        "trajectory_id": TrajectoryId(iteration, group, sample, split), "prompt": Prompt(
        f"q-{group}", ({"role": "user", "content": "1 + 2 ∙ 3?"},), {"answer": 7, "operations": ["+", {"x": None}]}),
        "token_ids": rng.integers(0, 500, num_tokens).astype(np.int32), "is_action": action,
        "behaviour_logprob": np.where(action, -rng.random(num_tokens), 0).astype(np.float32),
        "weight_version": np.where(action, iteration, -1).astype(np.int32),
        "kv_version": np.where(action, iteration - 1, -1).astype(np.int32),
        "turns": [_turn(rng, turn) for turn in range(num_turns)], "end_reason": EndReason.ANSWERED,
        "failure": FailureClass.NONE, "reward": float(rng.random()), "advantage": float(rng.standard_normal()),
        "epoch": 3,
    }  # fmt: skip
    made = Trajectory(**(values | changes))
    if experts is not None:
        made.routes = rng.integers(0, 8, (num_tokens, *experts)).astype(np.int16)
    if scored is not None and made.num_action_tokens:
        made.taught = _taught(rng, made.num_action_tokens, scored)
    return made


def _taught(rng, num_tokens, kind, columns=3):
    """Scores of ``kind``: top_k, or drawn by the teacher or by the student."""
    full = rng.dirichlet(np.ones(columns + 1), num_tokens)
    logp = np.log(full).astype(np.float32)
    return Taught(
        rng.integers(0, 500, (num_tokens, columns)).astype(np.int32), logp[:, :columns],
        -rng.random(num_tokens).astype(np.float32), rest_logp=logp[:, columns] if kind == "top_k" else None,
        old_logp=-rng.random((num_tokens, columns)).astype(np.float32) if kind == "drawn by the student" else None,
    )  # fmt: skip


def _assert_same(got, expected):
    for field in fields(Trajectory):
        one, other = getattr(got, field.name), getattr(expected, field.name)
        if isinstance(other, Taught):
            for name, values in other._asdict().items():
                np.testing.assert_array_equal(getattr(one, name), values, err_msg=name, strict=True)
        elif isinstance(other, np.ndarray):
            assert one.dtype == other.dtype, field.name
            np.testing.assert_array_equal(one, other, err_msg=field.name)
        elif isinstance(other, float):
            np.testing.assert_equal(one, other)  # equal bit for bit, and NaN is NaN
        else:
            assert one == other, field.name
            assert type(one) is type(other), field.name


@pytest.fixture(scope="session")
def make_trajectory():
    return _make


@pytest.fixture(scope="session")
def assert_same():
    return _assert_same


@pytest.fixture
def store(tmp_path):
    with TrajectoryStore.create(tmp_path / "trajectories.zarr", {"run": "demo"}) as made:
        yield made
