"""What a run leaves is read without Libra: its trajectories by plain zarr, its model by plain transformers, its log by replay.

README ("it decides in the open"), docs/observe.md and docs/quick_start.md (where its results are).
"""

import json
from collections import Counter

import numpy as np
import pytest
import whole_run
from safetensors.torch import load_file

from libra.facts import from_dict, to_dict
from libra.policy.log_replay import replay
from libra.store.event_log import EventReader

pytestmark = pytest.mark.core


def test_plain_zarr_reads_every_trajectory_once_and_the_version_of_every_token(finished):
    stored, tokens = whole_run.columns(finished.directory), whole_run.tokens(finished.directory)
    ids = list(zip(*(stored[name].tolist() for name in ("split", "iteration", "group", "sample")), strict=True))
    assert len(set(ids)) == len(ids) and Counter(stored["split"].tolist()) == {"train": 72, "eval": 4}
    assert len(tokens["token_ids"]) == stored["length"].sum()
    for row in np.flatnonzero(stored["split"] == "train"):
        span = slice(stored["offset"][row], stored["offset"][row] + stored["length"][row])
        action, version = tokens["is_action"][span], tokens["weight_version"][span]
        assert action.sum() == 3 * 4
        assert version[action].min() == stored["oldest_version"][row] and set(version[~action]) == {-1}
        assert version[action].max() <= stored["batch"][row]
        assert (tokens["behaviour_logprob"][span][action] < 0).all()


def test_plain_transformers_loads_the_checkpoint_which_is_the_last_version(finished):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert finished.checkpoint is not None and finished.checkpoint.name == "step-000006"
    model = AutoModelForCausalLM.from_pretrained(finished.checkpoint)
    assert AutoTokenizer.from_pretrained(finished.checkpoint).decode([65])
    first, *_, last = sorted((finished.directory / "weights").iterdir())
    begun, published = (load_file(next(version.glob("*.safetensors"))) for version in (first, last))
    state = model.state_dict()
    assert published.keys() <= state.keys()
    for name, tensor in published.items():
        assert np.array_equal(state[name].numpy(), tensor.numpy()) and not np.array_equal(begun[name], tensor), name


def test_replay_comes_to_every_decision_of_the_log_again(finished):
    path = finished.directory / "events.jsonl"
    told = list(replay((line, from_dict(event).fact) for line, event in EventReader(path)))
    assert [step.difference for step in told if step.difference] == [] and not told[-1].cut
    kinds = Counter(type(entry.command).__name__ for step in told for entry in step.logged)
    assert kinds["OpenGate"] == kinds["OpenBatch"] == 6 and kinds["SetPriority"] > 72


def test_log_and_metrics_agree_with_what_was_done(finished):
    events = whole_run.events_of(finished.directory)
    assert all(to_dict(from_dict(event)).keys() == event.keys() for event in events)
    names = Counter(event["name"] for event in events)
    assert names["quantum_finished"] == names["quantum_dispatched"] == names["trajectory_parked"] == (72 + 4) * 5
    assert names["group_committed"] == 12 + 4 and names["batch_opened"] == 6
    assert [e["version"] for e in events if e["name"] == "version_published"] == list(range(7))
    assert not list((finished.directory / "journal").glob("*.rec"))  # all are in the store
    assert [result["version"] for result in finished.evaluations] == [0, 6]
    metrics = [json.loads(line) for line in (finished.directory / "metrics.jsonl").read_text().splitlines()]
    assert [row["reward"] for row in metrics if "reward" in row] == [v["reward"] for v in finished.iterations]
