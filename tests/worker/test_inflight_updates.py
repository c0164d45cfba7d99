"""Ten updates while turns are under way: every token's log-probability is the trainer's, under the version it names."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from libra.rollout import TransformersEngine
from libra.train import Replica, StepReport, TrainSettings
from libra.types import EndReason, Prompt, Trajectory, TrajectoryId, TurnOutput, TurnRequest
from libra.weights import VersionCheck, WeightStore
from libra.worker.verified_engine import Serving
from libra.worker.weight_publishing import publish_checked

CONTEXT, NEW, UPDATES = 96, 24, 10


def trajectory_of(request: TurnRequest, output: TurnOutput, advantage: float) -> Trajectory:
    """What the trainer is given of one turn."""
    prompt, new = len(request.context_ids), len(output.token_ids)

    def column(values: np.ndarray, other: Any) -> np.ndarray:
        return np.concatenate([np.full(prompt, other, values.dtype), values])

    return Trajectory(
        trajectory_id=TrajectoryId(0, 0, 0),
        prompt=Prompt("p", ()),
        token_ids=np.concatenate([request.context_ids, output.token_ids]),
        is_action=column(np.ones(new, bool), False),
        behaviour_logprob=column(output.logprobs, 0.0),
        weight_version=column(output.weight_versions, -1),
        kv_version=column(output.kv_versions, -1),
        turns=[{"prompt_tokens": prompt}],
        end_reason=EndReason.ANSWERED,
        advantage=advantage,
    )


def hold_in_mid_turn(engine: TransformersEngine) -> asyncio.Event:
    """Have the engine pause itself before its fifth step from now; the event is set once it has."""
    held, loop, step, count = asyncio.Event(), asyncio.get_running_loop(), engine._batch.step, iter(range(10**6))

    def stepping():
        if next(count) == 4:
            engine._batch.step = step
            engine._set_paused(True)
            loop.call_soon_threadsafe(held.set)
        return step()

    engine._batch.step = stepping
    return held


async def ten_updates(
    model_dir: Path, root: Path, engine_of: Callable[[Path, int], TransformersEngine], exact: bool
) -> tuple[list[StepReport], list[TurnOutput], WeightStore, Replica]:
    """Batches generated with one update in the middle of each, and trained on by the step of the version that arrived."""
    replica = Replica(model_dir, TrainSettings(lr=1e-2, exact_logprobs=exact), threads=1)
    store = WeightStore(root)
    publish_checked(store, replica, 0, CONTEXT)

    async def newest():
        return store.latest()

    serving = Serving(model_dir, build=engine_of, newest=newest, report=lambda report: None, store=store)
    await serving.start()
    reports, outputs = [], []
    try:
        batch: list[Trajectory] = []
        for update in range(UPDATES + 1):
            requests = [
                TurnRequest(f"{update}-{n}", 0, np.arange(3 + n, 15 + n, dtype=np.int32), NEW, seed=100 * update + n)
                for n in range(6)
            ]
            await serving.pull()
            held = hold_in_mid_turn(serving.engine) if batch else None
            turns = [asyncio.ensure_future(serving.generate(request)) for request in requests]
            if held is not None:
                await held.wait()
                reports.append(replica.step(batch, update - 1))
                publish_checked(store, replica, update, CONTEXT)
                serving.announced = update
                await serving.pull()
                await serving.engine.resume()
            made = [await turn for turn in turns]
            outputs += made
            batch = [trajectory_of(r, o, (-1.0) ** n) for n, (r, o) in enumerate(zip(requests, made, strict=True))]
        reports.append(replica.step(batch, UPDATES))
    finally:
        await serving.close()
    return reports, outputs, store, replica


@pytest.mark.parametrize("exact", [False, True], ids=["as sampled", "exact"])
def test_after_ten_updates_in_flight_engine_and_trainer_agree(random_model, tmp_path, exact):
    engines = []

    def engine_of(directory: Path, version: int) -> TransformersEngine:
        engines.append(
            TransformersEngine(
                directory, slots=8, max_context_tokens=CONTEXT, threads=1, version=version, exact_logprobs=exact
            )
        )
        return engines[-1]

    reports, outputs, store, _ = asyncio.run(ten_updates(random_model, tmp_path / "weights", engine_of, exact))
    assert len(engines) == 1, "no engine was quarantined"
    assert [report.step for report in reports] == list(range(UPDATES + 1))
    gaps = [report.mismatch_max_abs for report in reports if report.mismatch_tokens]
    assert len(gaps) == UPDATES + 1, "every step saw tokens of its own version"
    assert max(gaps) <= 1e-3
    if exact:
        assert max(gaps) == 0.0
    in_flight = [set(map(int, output.weight_versions)) for output in outputs]
    assert sum(len(versions) == 2 for versions in in_flight) >= UPDATES, "turns that saw two versions"
    for number in range(1, UPDATES + 1):
        check = VersionCheck.from_json(store.check_text(number), number)
        moved = np.abs(np.concatenate(check.logp) - np.concatenate(check.previous_logp))
        assert moved.max() >= 0.05, f"version {number} hardly differs from the one before"
