"""A run whose every second is known (a declared emulation in virtual time), and what is read and predicted from its directory."""

import json
from dataclasses import replace

import pytest

from libra.cli.main import main
from libra.facts import WorkerWithdrawn
from libra.hardware.engine_seconds import MeasuredEngine
from libra.hardware.engine_tables import EngineTables
from libra.hardware.run_calibration import QuantumOverhead, read_calibration
from libra.policy import make_ordering
from libra.sim.configured import simulator_of_run
from libra.sim.engines_of_run import binned
from libra.sim.from_run import run_options, run_setting
from libra.sim.simulation_options import Announced, EngineSpec, SimulationOptions
from libra.sim.simulator import Simulator
from libra.sim.workload import TrajectoryPlan, TurnPlan, Workload
from libra.types import NO_TOOL, StepSeconds, ToolStatus
from simulated_run import write_simulated_run

FAST = StepSeconds(0.004, 0.0002, 1e-6, 2e-5, 2048, 0.01)
SLOW = StepSeconds(0.012, 0.0006, 3e-6, 6e-5, 2048, 0.02)
BETWEEN = QuantumOverhead((0.06,), (0.02,))
AROUND = SimulationOptions(
    train_s=1.5, tool_slots=64, inline_tools=frozenset({""}), tool_overhead=QuantumOverhead((0.02,), (0.005,)), gate_s=0.1,
    commit_s=0.05, reserve=(256, 4096),
)  # fmt: skip


def workload(iterations=2):
    plans = []
    for iteration in range(iterations):
        for number in range(48):
            turns = [
                TurnPlan(
                    20 + (7 * number + 13 * turn + iteration) % 90, "" if (number + turn) % 7 == 3 else "bash",
                    ToolStatus.MALFORMED if (number + turn) % 7 == 3 else ToolStatus.OK, 5 + (3 * number + turn) % 40,
                    0.0 if (number + turn) % 7 == 3 else 0.05 + 0.01 * (number % 5),
                )
                for turn in range(2 + number % 6)
            ]  # fmt: skip
            turns[-1] = TurnPlan(turns[-1].new_tokens, "", NO_TOOL, 0, 0.0)
            plans.append(TrajectoryPlan(iteration, number // 4, number % 4, 150 + number // 4, tuple(turns)))
    return Workload("emulated", tuple(plans))


def engines():
    kinds = (("rollout-0", FAST, 16), ("rollout-1", SLOW, 6))
    return tuple(
        EngineSpec(
            name, 1, slots, EngineTables(MeasuredEngine(steps, 1, slots * 4096), grain_tokens=1, max_contexts=slots),
            f"transformers-tp1-{name}", BETWEEN,
        )
        for name, steps, slots in kinds
    )  # fmt: skip


@pytest.fixture(name="run", scope="module")
def _run(tmp_path_factory):
    """A run directory, and what its run came to; each is written once, and tests only read it."""
    written = {}

    def write(policy="cmlfq", around=AROUND, *, declares=True, **sections):
        name = repr((policy, around, declares, sections))
        if name not in written:
            root = tmp_path_factory.mktemp("runs")
            config = {
                "run": {"name": "emulated", "dir": str(root)}, "model": {"path": "libra/tiny-arithmetic"},
                "policy": {"name": policy}, "rollout": {"max_new_tokens": 256, "max_context_tokens": 4096},
                "trainer": {"max_row_tokens": 4096},
            }  # fmt: skip
            directory, steps = root / "emulated", {"rollout-0": FAST, "rollout-1": SLOW}
            outcome = write_simulated_run(
                directory, workload(), engines(), steps, make_ordering(policy), around, config=config | sections,
                declares=declares,
            )  # fmt: skip
            written[name] = directory, outcome
        return written[name]

    return write


@pytest.fixture(name="libra")
def _libra(capsys):
    def call(*arguments):
        with pytest.raises(SystemExit) as stopped:
            main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return int(stopped.value.code or 0), out, err

    return call


@pytest.mark.parametrize("policy", ["fifo", "cmlfq"])
def test_a_run_is_predicted_as_it_was(run, policy):
    directory, was = run(policy)
    setting = run_setting(directory)
    predicted, realised = simulator_of_run(setting)[0].run(), setting.realised
    assert realised.makespan_s == pytest.approx(was.makespan_s, rel=1e-9)
    assert realised.moves == was.moves > 0
    assert predicted.makespan_s == pytest.approx(was.makespan_s, rel=0.03)
    assert predicted.rollout_s == pytest.approx(was.rollout_s, rel=0.05)  # single iterations differ by who moved
    assert abs(predicted.moves - was.moves) <= max(2, 0.2 * was.moves)
    assert (predicted.turns, predicted.generated_tokens) == (was.turns, was.generated_tokens)


def test_a_run_in_chunks_is_predicted_as_it_was(run):
    directory, was = run(
        around=replace(AROUND, chunk_tokens=16),
        rollout={"max_new_tokens": 256, "max_context_tokens": 4096, "chunk_tokens": 16},
    )
    setting = run_setting(directory)
    assert simulator_of_run(setting)[0].run().makespan_s == pytest.approx(was.makespan_s, rel=0.05)
    for engine in setting.calibration.engines:
        assert engine.wall_over_passes == pytest.approx(1.0, abs=0.1)


def test_an_engine_that_was_away_is_away_in_the_prediction():
    first, second = engines()
    facts = (second.joined(1), WorkerWithdrawn(second.name), second.joined(1))
    second = second._replace(announced=tuple(map(Announced, (0, 0, 0), (0.0, 0.6, 3.0), facts)))
    result = Simulator(workload(1), (first, second), make_ordering("cmlfq"), options=AROUND).run()
    there = [at.at_s for at in result.dispatched if at.worker == second.name]
    assert result.trajectories == 48 and min(there) < 0.6 and max(there) > 3.0
    assert not any(0.6 < at_s < 3.0 for at_s in there)


def test_everything_between_engines_is_read_from_the_log(run):
    directory, _ = run()
    setting = run_setting(directory)
    for engine, steps in zip(setting.calibration.engines, (FAST, SLOW), strict=True):
        assert engine.steps == steps
        assert engine.wall_over_passes == pytest.approx(1.0, abs=0.05)
        transport_s, worker_s = engine.overhead[:2]
        assert sum(transport_s) / len(transport_s) == pytest.approx(0.06, rel=1e-3)
        assert sum(worker_s) / len(worker_s) == pytest.approx(0.02, rel=1e-3)
    calibration, around = setting.calibration, run_options(setting, setting.record.config)
    assert max(calibration.tools.transport_s) == pytest.approx(0.02, rel=1e-3)
    assert max(calibration.tools.worker_s) == pytest.approx(0.005, rel=1e-3)
    assert (calibration.gate_s, calibration.commit_s) == pytest.approx((0.1, 0.05))
    assert around.steps_s == pytest.approx((1.5, 1.5))
    assert around.inline_tools == {""}
    assert around.tool_slots == 64


def test_a_log_without_declarations_is_refused(run, libra):
    directory, _ = run(declares=False)
    code, _, err = libra("simulate", "libra/quickstart", "--from-run", directory)
    assert code == 2 and "libra resume" in err


def test_typed_settings_replace_the_runs_own_and_others_are_named_as_without_effect(run, libra):
    given = ("simulation.train_s=9", "trainer.lr=0.1")
    _, out, _ = libra("simulate", "libra/quickstart", *given, "--from-run", run()[0])
    assert "overrides: simulation.train_s=9; all other" in out and "recorded run: trainer.lr=0.1" in out


def test_a_calibration_is_what_the_run_said(run, libra, tmp_path):
    directory, _ = run()
    file = tmp_path / "mine.json"
    code, out, err = libra("calibrate", directory, "--save", file)
    assert (code, err) == (0, "") and "by the declared capacity of its engines" in out
    assert read_calibration(file, "here").engines == run_setting(directory).calibration.engines
    small = ("trainer.prompts=4", "trainer.group_size=2", "planner.lengths.turns=3", "cluster.rollout_workers=2")
    code, out, _ = libra("simulate", "libra/quickstart", f"planner.calibration={file}", *small)
    assert code == 0 and f"as {file} measured, 2 x tp1" in out
    code, out, _ = libra("plan", "libra/quickstart", f"planner.calibration={file}")
    assert code == 0 and "engines of TP 2, 4, 8" in out and f"are as {file} measured" in out


@pytest.mark.parametrize("command", ["simulate", "plan"])
def test_a_calibration_of_something_else_is_refused_with_both_sides(run, libra, tmp_path, command):
    file = tmp_path / "mine.json"
    libra("calibrate", run()[0], "--save", file)
    code, _, err = libra(command, "libra/quickstart", f"planner.calibration={file}", "model.path=Qwen/Qwen3-14B")
    assert (code == 2 and "libra/tiny-arithmetic" in err) or "emulated" in err
    assert "Qwen/Qwen3-14B" in err
    old = tmp_path / "old.json"
    old.write_text(json.dumps({**json.loads(file.read_text()), "schema": 0}))
    code, _, err = libra(command, "libra/quickstart", f"planner.calibration={old}")
    assert code == 2 and "schema 0, and this Libra reads" in err


def test_bins_keep_the_mean_and_the_spread():
    values = [0.1 * n for n in range(37)]
    bins = binned(values)
    assert sum(bins) / len(bins) == pytest.approx(sum(values) / len(values))
    assert bins[0] < 0.2 and bins[-1] > 3.4
    assert binned([]) == (0.0,)
