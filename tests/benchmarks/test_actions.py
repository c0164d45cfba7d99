"""`benchmarks.actions`: its loads, and what its ways to share cores do with a load that can be worked out by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.action_loads import ActionSimulation, Step, drawn_load, drawn_tests, read_steps
from benchmarks.actions import WAYS, WIDE, arguments, source_of
from benchmarks.report import DATA
from benchmarks.service_loads import COPY_BYTES_PER_S, MAX_WAIT_S, WEIGHT_BYTES, Asked, asked_all
from libra.errors import ConfigError
from libra.policy.leases import SpeedUp

TWO_TURNS = [Step(1.0, 2.0, "tests"), Step(1.0, 2.0, "tests")]


def test_a_reserved_core_is_waited_for_and_a_leased_one_is_shared() -> None:
    """Two trajectories of two turns on one core: generations of 1 s, actions of 2 s."""
    leased = ActionSimulation([TWO_TURNS] * 2, 1, "arrival").run()
    assert sorted(leased.act_s) == [2.0, 3.0, 3.0, 4.0]  # 1-3, 3-5, 4-7 and 6-9
    assert leased.makespan_s == 9.0
    reserved = ActionSimulation([TWO_TURNS] * 2, 1, "reserved").run()
    assert sorted(reserved.act_s) == [2.0, 2.0, 2.0, 6.0 + 2.0]
    assert reserved.makespan_s == 12.0
    bound = ActionSimulation([TWO_TURNS] * 2, 2, "bound").run()
    assert bound.act_s == [2.0] * 4


def test_elastic_actions_take_cores_that_are_free() -> None:
    curves = {"tests": SpeedUp(1, 4, {1: 1.0, 4: 4.0})}
    assert ActionSimulation([TWO_TURNS], 4, "leases", curves).run().act_s == [0.5, 0.5]
    assert ActionSimulation([TWO_TURNS], 4, "arrival", curves).run().act_s == [2.0, 2.0]


def test_actions_that_are_stopped_end_once_and_make_room() -> None:
    load, curves = drawn_tests(8, 0), [{"long": SpeedUp(1, 8, WIDE)} for _ in range(2)]
    kept, may = (ActionSimulation(load, 8, way, each).run() for way, each in zip(WAYS, curves, strict=True))
    assert len(may.act_s) == len(kept.act_s) == sum(map(len, load))
    assert may.stopped > 0 and kept.stopped == 0 and may.mean_act_s < kept.mean_act_s


def test_the_excerpt_gives_loads_that_a_seed_repeats() -> None:
    source = source_of(DATA)
    assert source.name == "mini_swe_gemini3"
    assert not source.measured
    assert drawn_load(source, 8, 1.0, 3) == drawn_load(source, 8, 1.0, 3)
    once, twice = drawn_load(source, 8, 1.0, 3), drawn_load(source, 8, 2.0, 3)
    assert twice[0][0].llm_s == 2 * once[0][0].llm_s
    assert twice[0][0].work_s == once[0][0].work_s


def test_ten_services_share_devices_and_each_request_is_answered_once() -> None:
    """Requests a minute apart: on three devices a request waits for others, for its weights, and for nobody else."""
    requests = [Asked(60.0 * n, n % 10, 1.0) for n in range(30)]
    alone, few = asked_all(requests, 10), asked_all(requests, 3)
    assert alone.act_s == pytest.approx([1.0 + MAX_WAIT_S] * 30)
    assert alone.restored == 0
    restore_s = WEIGHT_BYTES / COPY_BYTES_PER_S
    assert few.restored == 10  # twelve fit
    assert few.act_s == pytest.approx([1.0 + MAX_WAIT_S + restore_s] * 10 + [1.0 + MAX_WAIT_S] * 20)
    large = asked_all(requests, 3, weight_bytes=4 * WEIGHT_BYTES)  # one fits on each
    assert large.restored == 30


def test_data_without_seconds_and_bad_options_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "agent_turns").mkdir()
    (tmp_path / "agent_turns" / "bare.csv").write_text("task,turn,tool,status,completion_tokens\na,0,,,5\n")
    assert read_steps(tmp_path / "agent_turns" / "bare.csv") is None
    with pytest.raises(ConfigError, match="no set has tool_s or gap_s"):
        source_of(tmp_path)
    with pytest.raises(SystemExit):
        arguments(["--saved", "2"])
    assert "type a share between 0 and 1" in capsys.readouterr().err
