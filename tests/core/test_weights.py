"""No token is older than the staleness bound, and an engine proves its weights before one of its tokens is trained on.

README ("an engine proves its weights"), docs/weights.md, docs/staleness.md (the bound ``run.eta``).
"""

from collections import Counter

import numpy as np
import pytest
import whole_run

from libra.driver.run_session import run

pytestmark = pytest.mark.core


def test_with_eta_1_no_token_is_older_and_every_group_is_consumed_once(finished):
    stored = whole_run.columns(finished.directory)
    train = stored["batch"] >= 0
    lag = (stored["batch"] - stored["oldest_version"])[train]
    assert lag.min() >= 0 and lag.max() == 1
    whole_run.check_once(finished.directory, 6, size=6)
    assert max(values["lag_max"] for values in finished.iterations) == 1
    gaps = [values["mismatch_max_abs"] for values in finished.iterations if values["mismatch_tokens"]]
    assert gaps and max(gaps) < 1e-3  # the engine's against the trainer's


def break_next_load(version):
    """On a worker: the next engine that loads ``version`` keeps a stale head; engines after it are whole."""
    from libra.rollout import TransformersEngine

    whole = TransformersEngine._load

    def load(engine, number, directory):
        old = engine._batch.model.lm_head.weight.clone()
        whole(engine, number, directory)
        if number == version:
            TransformersEngine._load = whole
            head = type(engine._batch.forward.head)(*reversed(old.shape), bias=False)
            head.weight.data = old
            engine._batch.forward.head = head.requires_grad_(False)

    TransformersEngine._load = load


break_next_load.__module__ = "__main__"  # sent to the worker by value, which cannot import this file


def test_an_engine_with_a_stale_layer_is_quarantined_and_the_run_goes_on(make_config, client, worker_address):
    client.run(break_next_load, 2, workers=[worker_address("rollout-0")])
    summary = run(make_config(run={"iterations": 4}, trainer={"lr": 1e-2}), client=client)
    assert [values["iteration"] for values in summary.iterations] == [0, 1, 2, 3]
    assert all(values.get("mismatch_max_abs", 0.0) < 1e-3 and values["left_out"] == 0 for values in summary.iterations)
    events = whole_run.events_of(summary.directory)
    (told,) = [event for event in events if event["name"] == "engine_quarantined"]
    assert (told["version"], told["layer"], told["out"]) == (2, "lm_head.weight", False)
    checked = [event for event in events if event["name"] == "version_checked"]
    assert [event["version"] for event in checked] == [0, 1, 2, 3, 4][: len(checked)] and len(checked) >= 4
    assert all(event["measured"] and event["smallest_change"] == 0 for event in checked[1:])
    assert events.index(told) < events.index(next(event for event in checked if event["version"] == 2))


def test_weights_change_between_two_tokens_of_a_turn_and_each_token_names_its_own(make_config, client):
    config = make_config(
        run={"iterations": 5, "eta": 1}, rollout={"max_new_tokens": 300, "max_turns": 1, "exact_logprobs": True},
        trainer={"lr": 1e-2}, checkpoint={"every": 0},
    )  # fmt: skip
    summary = run(config, client=client)
    assert {values["mismatch_max_abs"] for values in summary.iterations if values["mismatch_tokens"]} == {0.0}
    stored, tokens = whole_run.columns(summary.directory), whole_run.tokens(summary.directory)
    mixed = 0
    for row in range(len(stored["offset"])):
        span = slice(stored["offset"][row], stored["offset"][row] + stored["length"][row])
        versions = tokens["weight_version"][span][tokens["is_action"][span]]
        assert (np.diff(versions) >= 0).all()
        assert np.array_equal(tokens["kv_version"][span][tokens["is_action"][span]], versions)
        mixed += len(Counter(versions.tolist())) > 1
    assert mixed > 0
