"""Workers change their roles, steps are streamed, runs share a scheduler, and a stuck part is named.

docs/training_group.md (role changes, a streamed step is the whole step), docs/failures.md (the watchdog).
That the live plugin and the simulator decide alike is in tests/scheduler/test_parity.py.
"""

import threading
from collections import Counter

import numpy as np
import pytest
import torch
import whole_run
from distributed import Client
from streamed_runs import waves_of

from libra.driver.run_session import RunSummary, Session, run
from libra.envs import tool
from libra.errors import ClusterError
from libra.policy.role_changes import Stage
from libra.testing import FixedTurns
from libra.types import ToolCall
from libra.weights import WeightStore

pytestmark = pytest.mark.core


def test_an_engine_trains_for_a_while_and_generates_again(make_config, client_wide):
    config = make_config(run={"iterations": 6}, cluster={"rollout_workers": 2, "train_workers": 2, "hybrid_workers": 1})
    stages = [str(stage) for stage in Stage if stage is not Stage.RESUPPLIED]
    with Session(config, client=client_wide) as session:
        iterations = session.iterations()
        rows = [next(iterations)]
        there = session.scheduler.change_roles({"rollout-0": "train"})
        assert session.scheduler.wait_for_roles(there)
        rows += [next(iterations) for _ in range(3)]
        assert session.scheduler.roles()[0]["role"] == "train"
        with pytest.raises(ClusterError):
            session.scheduler.change_roles({"rollout-0": "train"})
        back = session.scheduler.change_roles({"rollout-0": {"role": "rollout", "tp": 1}})
        assert session.scheduler.wait_for_roles(back)
        rows += iterations
    directory = session.directory
    assert max(row["hybrids"] for row in rows[1:4]) == 1
    assert rows[0]["hybrids"] == rows[-1]["hybrids"] == 0
    assert all(row["hybrids_lost"] == 0 for row in rows)
    # A step that gave the joiner no slice never looked at it: it waited for nothing.
    assert all(row["hybrid_wait_s"] == 0 for row in rows if row["hybrids"] == 0)
    whole_run.check_once(directory, 6)
    changed = whole_run.events_of(directory, "role_changed")
    assert [(e["worker"], e["generation"], e["from_role"], e["to_role"]) for e in changed] == [
        ("rollout-0", there, "rollout", "train"),
        ("rollout-0", back, "train", "rollout"),
    ]
    assert all(list(e["stage_s"]) == stages for e in changed)
    told = [
        (e["generation"], e["stage"]) for e in whole_run.events_of(directory, "role_stage") if e["stage"] != "state"
    ]
    assert told == [(generation, stage) for generation in (there, back) for stage in stages]
    at = [
        (e["t_s"], e["worker"]) for e in whole_run.events_of(directory, "quantum_dispatched") if e["phase"] == "ROLLOUT"
    ]
    away, again = (e["t_s"] for e in changed)
    assert "rollout-0" not in {worker for t_s, worker in at if away < t_s < again}
    assert "rollout-0" in {worker for t_s, worker in at if t_s > again}


def weights_of(directory, version):
    store = WeightStore(directory / "weights")
    return store.read(store.get(version))


def test_a_streamed_step_is_the_whole_step(make_config, client):
    done = {
        streaming: run(
            make_config(
                run={"name": f"streaming_{streaming}"},
                trainer={"prompts": 6, "group_size": 3, "lr": 1e-4, "streaming": streaming},
                store={"keep_versions": 9},
            ),
            client=client,
        )
        for streaming in ("off", "on")
    }
    off, on = done["off"].directory, done["on"].directory
    before, streamed, whole = weights_of(on, 0), weights_of(on, 1), weights_of(off, 1)
    for name, weight in streamed.items():
        assert torch.allclose(weight, whole[name], rtol=0, atol=2e-6), name
        assert not torch.equal(weight, before[name]), name
    for batch in range(2):
        waves = waves_of(on, batch)
        assert len(waves) > 1 and len(waves[0]) < 6  # the first opens with the first group
        assert sorted(group for wave in waves for group in wave) == [(batch, g) for g in range(6)]
        assert waves_of(off, batch) == []
    for values, plain in zip(done["on"].iterations, done["off"].iterations, strict=True):
        assert values["waves"] == len(waves_of(on, int(values["iteration"]))) and "waves" not in plain
        assert 0 < values["streamed_frac"] < 1 and values["sequences"] == plain["sequences"] == 18
    trained = whole_run.events_of(on, "wave_trained")
    assert [(e["batch"], e["wave"]) for e in trained] == [(k, j) for k in range(2) for j in range(len(waves_of(on, k)))]
    whole_run.check_once(on, 2, prompts=6, size=3)


def test_two_runs_with_different_seeds_share_a_scheduler(make_config, client):
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
    for name, summary in summaries.items():
        whole_run.check_once(summary.directory, 3)
        assert {event["run"] for event in whole_run.events_of(summary.directory)} == {name}
    one, two = (whole_run.columns(summaries[name].directory)["reward"] for name in ("one", "two"))
    assert not np.array_equal(one, two)


def test_the_watchdog_names_what_is_stuck_and_restarts_it(make_config, client, tmp_path):
    marker = tmp_path / "hung once"

    class BlocksOnce(FixedTurns):
        def __init__(self) -> None:
            super().__init__()

            async def block(text: str) -> str:
                """Block the event loop, the first time only.

                Args:
                    text: Anything.
                """
                try:
                    marker.touch(exist_ok=False)
                except FileExistsError:
                    return text
                threading.Event().wait()
                return "never"

            self.tools = (tool(block),)

        def parse(self, text: str) -> tuple[ToolCall, ...]:
            return (ToolCall("block", {"text": "y"}),)

    config = make_config(run={"iterations": 1}, watchdog={"timeout_s": 5.0, "restart": True})
    directory = run(config, environment=BlocksOnce(), client=client).directory
    stall = whole_run.events_of(directory, "stall_detected")[0]
    assert (stall["worker"], stall["stage"], stall["restarts"]) == ("tool-0", "trajectory, TOOL", True)
    stacks = (directory / stall["stacks"]).read_text()
    assert "in block" in stacks
    assert set(whole_run.columns(directory)["failure"]) == {"policy"}
    assert Counter(e["quantum"] for e in whole_run.events_of(directory, "quantum_finished")) == dict.fromkeys(
        range(5), 4
    )
    whole_run.check_once(directory, 1)
