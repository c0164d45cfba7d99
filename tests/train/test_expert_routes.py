import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import factories
from libra.errors import ModelError, TrainError
from libra.experts import Routers
from libra.rollout.transformers_engine import TransformersEngine
from libra.train import Replica, TrainSettings
from libra.train.samples import sample_of
from libra.train.slice_gradient import load_ratio
from libra.types import TrajectoryId, TurnRequest

EXPERTS = 8


def turns_of(directory, slots=48):
    """Trajectories of two turns by an engine that records routes: each kind of prompt has an alphabet and a length of its own."""

    async def generate():
        engine = TransformersEngine(directory, slots=slots, max_context_tokens=256, threads=1, record_routes=True)
        await engine.start()
        try:
            samples = [one(engine, kind, sample) for kind in range(12) for sample in range(4)]
            return list(await asyncio.gather(*samples))
        finally:
            await engine.close()

    async def one(engine, kind, sample):
        rng = np.random.default_rng(kind)
        alphabet = rng.integers(0, 256, 2)
        parts = [(rng.choice(alphabet, 24 + 8 * kind).astype(np.int32), None)]
        routes = np.full((0, 2, 2), -1, np.int16)
        for turn in range(2):
            ids = np.concatenate([ids for ids, _ in parts])
            output = await engine.generate(TurnRequest(f"{kind}-{sample}", turn, ids, 6, seed=10 * sample + turn))
            assert output.routes is not None and (slots < 48 or output.routes_from == len(routes))
            routes = np.concatenate([routes[: output.routes_from], output.routes])
            parts += [(output.token_ids, output), (rng.choice(alphabet, 4).astype(np.int32), None)]
        parts.pop()
        known = [np.full(len(ids), output is not None) for ids, output in parts]
        logp = [np.zeros(len(ids)) if output is None else output.logprobs for ids, output in parts]
        action = np.concatenate(known)
        versions = np.where(action, 0, -1).astype(np.int32)
        return factories.trajectory(
            TrajectoryId(0, kind, sample), lengths=(len(action),), token_ids=np.concatenate([ids for ids, _ in parts]),
            is_action=action, behaviour_logprob=np.concatenate(logp).astype(np.float32), weight_version=versions,
            kv_version=versions.copy(), advantage=1.0 if sample % 2 else -1.0,
            routes=np.concatenate([routes, np.full((len(action) - len(routes), 2, 2), -1, np.int16)]),
        )  # fmt: skip

    return asyncio.run(generate())


@pytest.fixture(scope="module")
def recorded(random_moe):
    return turns_of(random_moe)


@pytest.fixture
def make_replica(random_moe):
    def make(dtype="float32", **settings):
        wanted = {"lr": 1e-3, "routes": "replay", "max_row_tokens": 128, "micro_batch_tokens": 512, **settings}
        return Replica(random_moe, TrainSettings(**wanted), dtype=dtype, threads=1)

    return make


def test_the_engine_records_what_transformers_chooses(random_moe, recorded):
    model = AutoModelForCausalLM.from_pretrained(random_moe, dtype=torch.float32).eval()
    routers = Routers(model, listen=True)
    for made in recorded[::5]:
        with torch.no_grad():
            model(input_ids=torch.from_numpy(made.token_ids[None, :-1].astype(np.int64)))
        assert np.array_equal(np.sort(routers.take().numpy(), -1), np.sort(made.routes[:-1], -1))
    assert (np.concatenate([made.routes[-1:] for made in recorded]) == -1).all()  # the last token was never fed


def test_under_equal_weights_the_trainer_chooses_what_was_recorded(make_replica, recorded):
    report = make_replica().step(recorded, 0)
    assert report.routes_replayed_frac == 1.0 == report.routes_equal_frac
    assert report.mismatch_max_abs < 1e-3
    again = make_replica(routes="recompute").step(recorded, 0)
    assert again.routes_replayed_frac == 0.0
    assert (again.loss, again.grad_norm) == pytest.approx((report.loss, report.grad_norm), rel=1e-4)


def test_recorded_routes_are_taken_where_the_router_would_choose_others(make_replica, recorded):
    turned = [replace(made, routes=np.where(made.routes >= 0, (made.routes + 1) % EXPERTS, -1)) for made in recorded]
    report, own = make_replica().step(turned, 0), make_replica().step(recorded, 0)
    again = make_replica(gradient_checkpointing=True).step(turned, 0)  # replayed in the backward pass too
    assert again.grad_norm == pytest.approx(report.grad_norm, rel=1e-5)
    assert report.routes_replayed_frac == 1.0 and report.routes_equal_frac < 0.5
    assert report.mismatch_mean_abs > 100 * own.mismatch_mean_abs


def test_models_without_routers_and_routes_of_another_model_are_refused(make_replica, random_model, recorded):
    with pytest.raises(ModelError, match="routes"):
        Replica(random_model, TrainSettings(routes="replay"), threads=1)
    with pytest.raises(ModelError):
        make_replica().step([replace(made, routes=made.routes[:, :1]) for made in recorded], 0)
    with pytest.raises(TrainError):
        sample_of(replace(recorded[0], routes=recorded[0].routes[:3]), 0)


def test_loads_count_recorded_tokens_only():
    routes = torch.tensor([[[0, 1]], [[1, 2]], [[-1, -1]]], dtype=torch.int16)  # loads 1, 2, 1, 0
    assert load_ratio(routes, 4) == 2.0 and load_ratio(routes[2:], 4) == 1.0


def test_contexts_that_lost_their_slot_are_recorded_again(random_moe, recorded):
    few = turns_of(random_moe, slots=3)
    assert [made.token_ids.tolist() for made in few] == [made.token_ids.tolist() for made in recorded]
    assert all(np.array_equal(np.sort(a.routes, -1), np.sort(b.routes, -1)) for a, b in zip(few, recorded, strict=True))
