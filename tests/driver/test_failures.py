"""Whose fault it was: bad rewards, tools, environments, engines and workers become classes, never a silent reward 0.

A NaN reward and the statuses of tools are in tests/core/test_learning.py.
"""

import os
import signal
import threading
from collections import Counter
from typing import Any

import numpy as np
import pytest
import whole_run
import zarr

from factories import kinds_of
from libra import errors
from libra.driver.run_session import RunSummary, Session, run
from libra.envs import tool
from libra.errors import BatchFailed, ConfigError, LibraError, NothingToLearn
from libra.store.trajectory_journal import Journal
from libra.testing import FixedTurns
from libra.types import Boundary, Episode, FailureClass, Prompt, ToolCall
from libra.worker.trajectory.graded_members import FAULTS, failure_of

ONE_ITERATION = {"run": {"iterations": 1}, "trainer": {"prompts": 2, "group_size": 4}}


def stored(summary: RunSummary) -> dict[str, np.ndarray]:
    return whole_run.columns(summary.directory)


def calm(make_config: Any, client: Any) -> RunSummary:
    return run(make_config(**ONE_ITERATION | {"run": {"iterations": 1, "name": "calm"}}), client=client)


def test_a_prompt_that_cannot_be_made_fails_its_group_only_and_the_sandbox_is_noted(make_config, client):
    class OddOnes(FixedTurns):
        isolation = "bubblewrap"

        def prompt(self, split: str, index: int) -> Prompt:
            if index % 2:
                raise KeyError(f"row {index}")
            return super().prompt(split, index)

    summary = run(make_config(**ONE_ITERATION), environment=OddOnes(), client=client)
    columns = stored(summary)
    assert Counter(map(str, columns["failure"])) == {"environment": 4, "policy": 4}
    assert set(columns["group"][columns["failure"] == "environment"]) == {1}
    assert zarr.open_group(summary.directory / "trajectories.zarr", mode="r").attrs["isolation"] == ["bubblewrap"]


def test_an_environment_without_any_prompt_is_one_clear_error(make_config, client):
    class Empty(FixedTurns):
        def prompt(self, split: str, index: int) -> Prompt:
            raise KeyError("no rows")

    with pytest.raises(LibraError, match="KeyError"):
        run(make_config(**ONE_ITERATION), environment=Empty(), client=client)


@pytest.mark.parametrize("resample", [0, 1])
def test_a_worker_that_dies_three_times_under_a_quantum_ends_that_attempt(make_config, client, resample):
    class Deadly(FixedTurns):
        def __init__(self) -> None:
            super().__init__()

            async def kill(text: str, action_id: str = "") -> str:
                """Kill the worker process, unless this is the second draw.

                Args:
                    text: Whose.
                """
                if "." not in action_id:
                    os.kill(os.getpid(), signal.SIGKILL)
                return text

            self.tools = (*self.tools, tool(kill))

        def parse(self, text: str) -> tuple[ToolCall, ...]:
            return (ToolCall("kill", {"text": text}),)

    trainer = {"prompts": 1, "group_size": 1, "normalize_std": False, "resample": resample}
    config = make_config(run={"iterations": 1}, trainer=trainer)
    summary = run(config, environment=Deadly(), client=client)
    columns = stored(summary)
    if resample:
        assert (columns["failure"][0], columns["retried"][0]) == ("policy", "worker")  # ended by max_turns
    else:
        assert list(columns["failure"]) == ["worker"] and "lost 3 times" in columns["failure_detail"][0]
    assert len(whole_run.events_of(summary.directory, "quantum_lost")) == 3
    classified = whole_run.events_of(summary.directory, "failure_classified")
    assert [e["failure"] for e in classified] == ["worker", "policy"][: 1 + resample]
    assert columns["attempt"][0] == summary.iterations[0]["resampled/worker"] == resample


class ToolThat(FixedTurns):
    """Its one tool does what ``how`` says at the first draw of samples 1, and answers everybody else."""

    def __init__(self, how: str, always: bool = False) -> None:
        super().__init__()
        self.how, self.always = how, always

        async def act(text: str, action_id: str = "") -> str:
            """Do something.

            Args:
                text: What.
            """
            import asyncio

            from libra.errors import ToolFault

            position, _, _ = action_id.partition("/")
            if position.endswith("-1") or (self.always and position.split(".")[0].endswith("-1")):
                if self.how == "timeout":
                    await asyncio.Event().wait()
                raise (ToolFault if self.how == "says so" else ConnectionError)("the sandbox is gone")
            return text

        fatal = {"timeout": ("timeout",), "error": ("error",)}.get(how, ())
        self.tools = (tool(act, timeout_s=0.2, fatal=fatal),)

    def parse(self, text: str) -> tuple[ToolCall, ...]:
        return (ToolCall("act", {"text": "y"}),)


@pytest.mark.parametrize(("how", "failure"), [("says so", "tool"), ("timeout", "timeout")])
def test_a_fatal_tool_failure_is_sampled_again_with_other_random_numbers(how, failure, make_config, client):
    summary = run(make_config(**ONE_ITERATION), environment=ToolThat(how), client=client)
    columns = stored(summary)
    again = columns["sample"] == 1
    assert set(columns["failure"]) == {"policy"} and np.isfinite(columns["reward"]).all()  # all ended by max_turns
    assert set(columns["retried"][again]) == {failure} and set(columns["attempt"][again]) == {1}
    assert set(columns["retried"][~again]) == {""} and set(columns["attempt"][~again]) == {0}
    assert set(columns["num_turns"]) == {3}, "turns of the attempt that failed were kept"
    values = summary.iterations[0]
    assert values["resampled"] == values[f"resampled/{failure}"] == 2 and values["left_out"] == 0
    first, second = (stored_first_turn(each) for each in (summary, calm(make_config, client)))
    different = [row for row in range(8) if not np.array_equal(first[row], second[row])]
    assert different == np.flatnonzero(again).tolist()


def stored_first_turn(summary: RunSummary) -> list[np.ndarray]:
    """Tokens generated in the first turn of each trajectory, in the order of group and sample."""
    columns, every = stored(summary), whole_run.tokens(summary.directory)
    tokens, action = every["token_ids"], every["is_action"]
    rows = np.lexsort((columns["sample"], columns["group"]))
    spans = [slice(o, o + n) for o, n in zip(columns["offset"][rows], columns["length"][rows], strict=True)]
    return [tokens[span][action[span]][:4] for span in spans]


def test_after_the_last_attempt_the_group_closes_with_who_is_left(make_config, client):
    config = make_config(run={"iterations": 1}, trainer={"prompts": 2, "group_size": 2, "resample": 2})
    summary = run(config, environment=ToolThat("error", always=True), client=client)
    columns, values = stored(summary), summary.iterations[0]
    bad = columns["sample"] == 1
    assert set(columns["failure"][bad]) == {"tool"} and np.isnan(columns["reward"][bad]).all()
    assert set(columns["retried"][bad]) == {"tool,tool"} and set(columns["attempt"][bad]) == {2}
    assert (columns["advantage"] == 0).all(), "one member has nobody to be compared with"
    counted = ("left_out", "failures/tool", "resampled", "groups_without_signal", "optimizer_steps")
    assert [values[name] for name in counted] == [2, 2, 4, 2, 0] and values["no_signal"]


def test_a_run_that_cannot_learn_stops_where_that_is_asked(make_config, client):
    class Constant(FixedTurns):
        def grade(self, episode: Episode) -> float:
            return 0.5

    config = make_config(run={"iterations": 4}, trainer={"no_signal": "stop"})
    with pytest.raises(NothingToLearn, match=r"all 4 rewards are 0\.5"):
        run(config, environment=Constant(), client=client)
    warned = config.model_copy(update={"trainer": config.trainer.model_copy(update={"no_signal": "warn"})})
    (values,) = run(warned, environment=Constant(), client=client, resume=True).iterations
    assert (values["iteration"], values["groups_without_signal"], values["frac_reward_zero_std"]) == (3, 2, 1.0)
    assert (values["reward_std"], values["reward_group_min"], values["reward_group_max"]) == (0.0, 0.5, 0.5)


def test_an_engine_that_failed_once_goes_on_from_what_was_committed(make_config, client):
    """The same tokens as without the failure: what fails has no say in what is sampled, so long answers lose nothing."""

    async def break_engine_once(run: str, dask_worker: Any) -> None:
        engine = dask_worker.plugins[f"libra-{run}"].engine.serving.engine
        generate, failed = engine.generate, set()

        async def first_time(request: Any) -> Any:
            from libra.errors import EngineError

            if request.turn == 2 and request.trajectory_id not in failed:
                failed.add(request.trajectory_id)
                raise EngineError("injected: out of memory")
            return await generate(request)

        engine.generate = first_time

    with Session(make_config(**ONE_ITERATION, store={"keep_journals": True}), client=client) as session:
        client.run(break_engine_once, "demo", workers=[whole_run.address_of(client, "rollout-0")])
        (values,) = session.iterations()
    directories = session.directory, calm(make_config, client).directory
    broken, whole = (whole_run.tokens(directory)["token_ids"] for directory in directories)
    assert np.array_equal(broken, whole)
    columns = whole_run.columns(session.directory)
    assert set(columns["retried"]) == {"engine"} and set(columns["failure"]) == {"policy"}
    assert values["resampled/engine"] == 8 and values["left_out"] == 0
    journal = Journal(session.directory / "journal").read("train-0-0-0")
    assert kinds_of(journal) == ["generation", "action"] * 2 + ["failure", "generation"]


def test_a_grader_that_failed_once_is_asked_again_about_the_same_answer(make_config, client, tmp_path):
    asked = tmp_path / "asked"
    asked.mkdir()

    class Flaky(FixedTurns):
        def grade(self, episode: Episode) -> float:
            try:
                (asked / episode.trajectory_id).touch(exist_ok=False)
            except FileExistsError:
                return super().grade(episode)
            raise ConnectionError("the judge does not answer")

    summary = run(make_config(**ONE_ITERATION), environment=Flaky(), client=client)
    columns = stored(summary)
    assert np.isfinite(columns["reward"]).all() and set(columns["retried"]) == {"reward"}
    assert summary.iterations[0]["resampled/reward"] == 8 and summary.iterations[0]["left_out"] == 0


def test_text_that_the_environment_cannot_read_is_its_failure(make_config, client):
    class Unreadable(FixedTurns):
        def parse(self, text: str) -> tuple[ToolCall, ...]:
            raise IndexError("no such field")

    config = make_config(**ONE_ITERATION | {"run": {"iterations": 3}})
    line = Unreadable.parse.__code__.co_firstlineno + 1
    with pytest.raises(BatchFailed, match=rf"IndexError: no such field in {__file__}, line {line}.* resume=True"):
        run(config, environment=Unreadable(), client=client)
    directory = config.run.dir / "demo"
    columns = whole_run.columns(directory)
    assert set(columns["failure"]) == {"environment"} and set(columns["attempt"]) == {1}
    assert all("Unreadable.parse raised IndexError" in detail for detail in columns["failure_detail"])
    assert not (directory / "batches" / "batch-2.json").exists()


def test_every_class_is_on_one_side_of_one_boundary_and_only_the_policys_trains():
    for failure in FailureClass:
        assert (failure.boundary is None) == (failure is FailureClass.NONE)
        assert failure.trains == (failure.boundary in (None, Boundary.POLICY))
    assert {failure.boundary for failure in FailureClass} == {None, *Boundary}


def test_every_fault_has_its_class():
    for fault, failure in (
        (errors.EngineError, FailureClass.ENGINE), (errors.ContextOverflow, FailureClass.ENVIRONMENT),
        (errors.EnvironmentFault, FailureClass.ENVIRONMENT), (errors.ToolFault, FailureClass.TOOL),
        (errors.ToolTimeout, FailureClass.TIMEOUT), (errors.RewardFault, FailureClass.REWARD),
        (errors.RewardTimeout, FailureClass.TIMEOUT),
    ):  # fmt: skip
        assert issubclass(fault, FAULTS) and failure_of(fault("x")) is failure, fault


def test_an_environment_that_workers_cannot_have_is_told_at_once(make_config, client, tmp_path, monkeypatch):
    source = "from libra.testing import FixedTurns\n\n\nclass Mine(FixedTurns):\n    pass\n"
    (tmp_path / "only_here_at_home.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    import only_here_at_home  # type: ignore[import-not-found]

    locked = FixedTurns()
    locked.lock = threading.Lock()  # type: ignore[attr-defined]
    for environment, named in ((only_here_at_home.Mine(), "only_here_at_home"), (locked, "lock")):
        with pytest.raises(ConfigError, match=named):
            run(make_config(), environment=environment, client=client)
    assert not (tmp_path / "demo").exists(), "a start that fails leaves no run directory"
    assert run(make_config(run={"name": "next", "iterations": 1}), client=client).iterations  # workers are all there
