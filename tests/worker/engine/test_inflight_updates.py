"""Updates while turns are under way: every token's log-probability is the trainer's, under the version it names."""

import asyncio

import numpy as np
import pytest

from checked_engines import held
from factories import trajectory
from libra.rollout import TransformersEngine
from libra.train import Replica, TrainSettings
from libra.types import TurnRequest
from libra.weights import WeightStore
from libra.weights.version_check import VersionCheck
from libra.worker.engine.verified_engine import Serving
from libra.worker.training.publications import publish_checked

CONTEXT, NEW, UPDATES = 96, 24, 3


def trajectory_of(request, output, advantage):
    """What the trainer is given of one turn."""
    prompt, new = len(request.context_ids), len(output.token_ids)

    def column(values, other):
        return np.concatenate([np.full(prompt, other, values.dtype), values])

    return trajectory(
        token_ids=np.concatenate([request.context_ids, output.token_ids]), is_action=column(np.ones(new, bool), False),
        behaviour_logprob=column(output.logprobs, 0.0), weight_version=column(output.weight_versions, -1),
        kv_version=column(output.kv_versions, -1), turns=[{"prompt_tokens": prompt}], advantage=advantage,
    )  # fmt: skip


async def updated_in_flight(model_dir, root, engine_of, exact):
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
        batch = []
        for update in range(UPDATES + 1):
            requests = [
                TurnRequest(f"{update}-{n}", 0, np.arange(3 + n, 15 + n, dtype=np.int32), NEW, seed=100 * update + n)
                for n in range(6)
            ]
            await serving.pull()
            reached = held(serving.engine, asyncio.get_running_loop(), at=4) if batch else None
            turns = [asyncio.ensure_future(serving.generate(request)) for request in requests]
            if reached is not None:
                await reached.wait()
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


@pytest.mark.live
@pytest.mark.parametrize("exact", [False, True], ids=["as sampled", "exact"])
def test_after_updates_in_flight_engine_and_trainer_agree(random_model, tmp_path, exact):
    engines = []

    def engine_of(directory, version):
        limits = {"slots": 8, "max_context_tokens": CONTEXT, "threads": 1}
        engines.append(TransformersEngine(directory, version=version, exact_logprobs=exact, **limits))
        return engines[-1]

    reports, outputs, store, _ = asyncio.run(updated_in_flight(random_model, tmp_path / "weights", engine_of, exact))
    assert len(engines) == 1, "no engine was quarantined"
    assert [report.step for report in reports] == list(range(UPDATES + 1))
    gaps = [report.mismatch_max_abs for report in reports if report.mismatch_tokens]
    assert len(gaps) == UPDATES + 1, "every step saw tokens of its own version"
    assert max(gaps) <= (0.0 if exact else 1e-3)
    in_flight = [set(map(int, output.weight_versions)) for output in outputs]
    assert sum(len(versions) == 2 for versions in in_flight) >= UPDATES, "turns that saw two versions"
    for number in range(1, UPDATES + 1):
        check = VersionCheck.from_json(store.check_text(number), number)
        moved = np.abs(np.concatenate(check.logp) - np.concatenate(check.previous_logp))
        assert moved.max() >= 0.05, f"version {number} hardly differs from the one before"
