"""Whole runs on real worker processes: what is in the store, the logs and the scheduler afterwards."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import zarr
from distributed import Client
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from libra.config import RunConfig
from libra.driver.session import RunSummary, Session, run
from libra.errors import RunDirectoryError
from libra.events import from_dict, to_dict
from libra.policy.log_replay import replay
from libra.store.event_log import EventReader, read_events

Config = Callable[..., RunConfig]


def columns(directory: Path) -> dict[str, np.ndarray]:
    """Per-trajectory columns, read by plain zarr."""
    group = zarr.open_group(directory / "trajectories.zarr", mode="r")
    return {name: array[:] for name, array in group["trajectory"].arrays()}


def test_a_run_leaves_whole_and_consistent_records(make_config: Config, client: Client) -> None:
    config = make_config(run={"iterations": 3}, evaluation={"prompts": 4})
    summary = run(config, client=client)
    directory = summary.directory
    assert [values["iteration"] for values in summary.iterations] == [0, 1, 2]
    assert [e["version"] for e in summary.evaluations] == [0, 3]

    stored = columns(directory)
    ids = list(zip(stored["split"], stored["iteration"], stored["group"], stored["sample"], strict=True))
    assert Counter(map(str, stored["split"])) == {"train": 12, "eval": 8}
    assert len(set(ids)) == len(ids)
    train = stored["split"] == "train"
    assert np.array_equal(stored["batch"][train], stored["iteration"][train])  # eta 0
    for batch in range(3):
        for group in range(2):
            rows = train & (stored["iteration"] == batch) & (stored["group"] == group)
            assert abs(stored["advantage"][rows].sum()) < 1e-5

    tokens = {name: array[:] for name, array in zarr.open_group(directory / "trajectories.zarr", mode="r").arrays()}
    for row in np.flatnonzero(train):
        span = slice(stored["offset"][row], stored["offset"][row] + stored["length"][row])
        action = tokens["is_action"][span]
        assert action.sum() == 3 * 4
        assert set(tokens["weight_version"][span][action]) == {stored["iteration"][row]}
        assert set(tokens["weight_version"][span][~action]) == {-1}
        assert (tokens["behaviour_logprob"][span][action] < 0).all()

    events = list(read_events(directory / "events.jsonl").events)
    assert all(to_dict(from_dict(event)).keys() == event.keys() for event in events)  # each as libra.events says
    names = Counter(event["name"] for event in events)
    quanta = (12 + 8) * (3 + 2)  # three generations and two actions each
    assert names["quantum_finished"] == names["quantum_dispatched"] == names["trajectory_parked"] == quanta
    assert names["group_committed"] == 6 + 8 and names["batch_opened"] == 3
    assert [e["version"] for e in events if e["name"] == "version_published"] == [0, 1, 2, 3]
    assert not (directory / "journal").exists() or not list((directory / "journal").iterdir())
    metrics = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    rewards = [row["reward"] for row in metrics if "reward" in row]
    assert rewards == [values["reward"] for values in summary.iterations]


def test_with_an_inline_tool_and_free_slots_a_trajectory_is_dispatched_once(
    make_config: Config, client: Client
) -> None:
    inline = {"name": "libra.testing:FixedTurns", "args": {"inline": True}}
    summary = run(make_config(environment=inline, run={"iterations": 1}), client=client)
    events = list(read_events(summary.directory / "events.jsonl").events)
    names = Counter(event["name"] for event in events)
    assert names["quantum_dispatched"] == names["trajectory_parked"] == 4
    assert (names["quantum_finished"], names["quantum_continued"]) == (4 * 3, 4 * 2)
    waits = [(bool(e["status"]), e["tools_s"], e["latency_s"]) for e in events if e["name"] == "quantum_finished"]
    assert sum(returned for returned, _, _ in waits) == 4 * 2
    assert all(0.0 < tools_s <= took_s if returned else tools_s == 0.0 for returned, tools_s, took_s in waits)
    stored = columns(summary.directory)
    turns = zarr.open_group(summary.directory / "trajectories.zarr", mode="r")["turn"]
    assert len(stored["reward"]) == 4 and len(turns["generated_tokens"][:]) == 4 * 3


def test_with_more_trajectories_than_slots_each_turn_is_dispatched_in_order(
    make_config: Config, client: Client
) -> None:
    inline = {"name": "libra.testing:FixedTurns", "args": {"inline": True}}
    config = make_config(environment=inline, run={"iterations": 1}, trainer={"prompts": 16, "group_size": 2})
    events = list(read_events(run(config, client=client).directory / "events.jsonl").events)
    names = Counter(event["name"] for event in events)
    assert names["quantum_finished"] == 32 * 3
    assert names["quantum_dispatched"] + names["quantum_continued"] == 32 * 3
    assert names["quantum_dispatched"] > 32  # 32 trajectories, 8 slots: those that run give way to those that wait


def test_every_decision_of_a_run_is_reproduced_from_its_event_log(make_config: Config, client: Client) -> None:
    inline = {"name": "libra.testing:FixedTurns", "args": {"inline": True}}
    config = make_config(
        environment=inline,
        run={"iterations": 4, "eta": 1},
        trainer={"prompts": 4, "group_size": 4},
        evaluation={"prompts": 4},
    )
    path = run(config, client=client).directory / "events.jsonl"
    told = list(replay((line, from_dict(event)) for line, event in EventReader(path)))
    assert [step.difference for step in told if step.difference] == [] and not told[-1].cut
    kinds = Counter(type(entry.command).__name__ for step in told for entry in step.logged)
    assert kinds["OpenGate"] == kinds["OpenBatch"] == 4 and kinds["SetPriority"] > 64


def test_the_checkpoint_is_the_last_version_and_loads_in_plain_transformers(
    make_config: Config, client: Client
) -> None:
    summary = run(make_config(), client=client)
    assert summary.checkpoint is not None
    model = AutoModelForCausalLM.from_pretrained(summary.checkpoint)
    newest = sorted((summary.directory / "weights").iterdir())[-1]
    published = load_file(next(newest.glob("*.safetensors")))
    state = model.state_dict()
    assert published.keys() <= state.keys()
    assert all(np.array_equal(state[name].numpy(), tensor.numpy()) for name, tensor in published.items())


def test_behaviour_logprobs_agree_with_the_trainer_on_the_same_version(make_config: Config, client: Client) -> None:
    summary = run(make_config(), client=client)
    for values in summary.iterations:
        assert values["mismatch_tokens"] > 0
        assert values["mismatch_max_abs"] < 1e-3
        assert values["optimizer_steps"] == 1


def test_with_staleness_every_group_is_consumed_once_and_no_token_is_too_old(
    make_config: Config, client: Client
) -> None:
    summary = run(make_config(run={"iterations": 6, "eta": 1}), client=client)
    stored = columns(summary.directory)
    lag = stored["batch"] - stored["oldest_version"]
    assert lag.min() >= 0 and lag.max() == 1
    assert Counter(stored["batch"]) == dict.fromkeys(range(6), 4)
    assert len(set(zip(stored["iteration"], stored["group"], stored["sample"], strict=True))) == 24


def test_the_scheduler_holds_as_many_tasks_after_fifty_iterations_as_after_five(
    make_config: Config, client: Client
) -> None:
    config = make_config(run={"iterations": 50}, trainer={"prompts": 1}, rollout={"max_turns": 1, "max_new_tokens": 1})
    counts = {}
    with Session(config, client=client) as session:
        for values in session.iterations():
            if values["iteration"] in (4, 47):
                settle(client, session)
                counts[values["iteration"]] = client.run_on_scheduler(count_tasks)
    assert counts[4] == counts[47] > 0


def count_tasks(dask_scheduler: object) -> int:
    return len(dask_scheduler.tasks)  # type: ignore[attr-defined]


def settle(client: Client, session: Session) -> None:
    """Wait until what was released is forgotten and only the iteration ahead is left, parked at its gate."""
    wanted = {f.key for iteration in session.graphs.pending.values() for f in (iteration.end, *iteration.groups)}
    ahead = {key.split("-")[2] for key in wanted}

    async def only_ahead(dask_scheduler: object) -> None:
        import asyncio

        def left() -> bool:
            return any(str(key).split("-")[2] not in ahead for key in dask_scheduler.tasks if "-train-" in str(key))  # type: ignore[attr-defined]

        while left():  # noqa: ASYNC110 - the scheduler has no event for "forgotten"
            await asyncio.sleep(0)

    client.run_on_scheduler(only_ahead)


def test_two_runs_with_different_seeds_share_a_scheduler(make_config: Config, client: Client) -> None:
    summaries: dict[str, RunSummary] = {}

    def start(name: str, seed: int) -> None:
        config = make_config(run={"name": name, "seed": seed, "iterations": 3})
        with Client(client.cluster, set_as_default=False) as own:
            summaries[name] = run(config, client=own)

    threads = [threading.Thread(target=start, args=(name, seed)) for seed, name in enumerate(("one", "two"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stored = {name: columns(summary.directory) for name, summary in summaries.items()}
    for name in ("one", "two"):
        assert len(stored[name]["reward"]) == 12
        events = list(read_events(summaries[name].directory / "events.jsonl").events)
        assert {event["run"] for event in events} == {name}
    assert not np.array_equal(stored["one"]["reward"], stored["two"]["reward"])


def test_the_same_seed_gives_the_same_trajectories(make_config: Config, client: Client, tmp_path: Path) -> None:
    tokens = []
    for name in ("first", "again"):
        summary = run(make_config(run={"name": name, "iterations": 1}), client=client)
        group = zarr.open_group(summary.directory / "trajectories.zarr", mode="r")
        tokens.append(group["token_ids"][:])
    assert np.array_equal(*tokens)


def test_an_existing_run_directory_is_refused(make_config: Config, client: Client, tmp_path: Path) -> None:
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "precious").touch()
    with pytest.raises(RunDirectoryError, match=r"run\.name=ANOTHER_NAME"):
        run(make_config(), client=client)
