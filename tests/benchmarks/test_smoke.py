"""One smoke of each benchmark: its help, and a run at a small size where that takes a second."""

import io
import json
import math
import subprocess
import sys
from importlib import import_module

import pytest

from benchmarks import BENCHMARKS, page, report
from benchmarks.__main__ import module_of
from benchmarks.live.move_review import moves
from benchmarks.report import DATA, MIN_PAIRS, Figure, alternate, emit, machine
from benchmarks.virtual.action_loads import ActionSimulation, Step
from benchmarks.virtual.draws import draw_alike
from libra import facts
from libra.errors import ConfigError
from libra.sim.workload import Trace, TurnPlan
from libra.types import NO_TOOL, Phase


def figures_of(out):
    """Values of the last line that a benchmark printed."""
    return {name: figure["value"] for name, figure in json.loads(out.splitlines()[-1])["figures"].items()}


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_benchmark_says_what_it_measures(name, capsys):
    with pytest.raises(SystemExit) as ended:
        import_module(module_of(name)).main(["--help"])
    assert ended.value.code in (0, None)
    assert "--json" in capsys.readouterr().out


@pytest.mark.live
def test_the_command_lists_benchmarks_and_runs_one(repository):
    command = [sys.executable, "-m", "benchmarks"]
    listed = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False)
    assert listed.returncode and [line.split()[0] for line in listed.stdout.splitlines()] == list(BENCHMARKS)
    helped = subprocess.run([*command, "planner", "--help"], cwd=repository, capture_output=True, text=True, check=True)
    assert helped.stdout.startswith("usage: python -m benchmarks planner")


def test_the_last_line_of_a_report_is_the_contract_and_sides_take_turns(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    stream, figures = io.StringIO(), {"ratio": Figure(1.5, "ratio", "higher", 2.0)}
    emit("vs_trl", figures, arguments=("--json", "--pairs", "7"), as_json=True, stream=stream)
    found = json.loads(stream.getvalue().splitlines()[-1])
    assert len(found.pop("load")) == 2 and found == {
        "benchmark": "vs_trl", "machine": machine(), "command": "python -m benchmarks vs_trl --json --pairs 7",
        "figures": {"ratio": {"value": 1.5, "unit": "ratio", "better": "higher", "goal": 2.0}},
    }  # fmt: skip
    assert not figures["ratio"].reached
    order = []
    assert alternate(lambda: order.append("A") or 4.0, lambda: order.append("B") or 2.0, pairs=MIN_PAIRS).ratio == 2.0
    assert order == ["A", "B"] * MIN_PAIRS
    with pytest.raises(ConfigError):
        alternate(lambda: 1.0, lambda: 1.0, pairs=MIN_PAIRS - 1)
    for number in (math.nan, math.inf):
        with pytest.raises(ValueError, match="finite"):
            Figure(number, "ratio", "higher", 1.0)


@pytest.mark.live
@pytest.mark.parametrize(("name", "load", "shown"), [("vs_trl", 0.1, 1), ("vs_trl", 7.0, 0), ("planner", 7.0, 1)])
def test_a_saved_figure_has_a_row_unless_its_seconds_were_taken_on_a_busy_machine(
    tmp_path, monkeypatch, name, load, shown
):
    monkeypatch.setattr(page, "CLAIMS", {f"{name}.x": "it is quick"})
    figure = {"value": 1.0, "unit": "s", "better": "lower", "goal": 2.0}
    made = {
        "benchmark": name,
        "figures": {"x": figure, "y": figure},
        "command": "c",
        "machine": "m",
        "load": [load, load],
    }
    saved = json.loads(report.save(made, tmp_path).read_text())
    assert saved["commit"] and saved["date"] and saved["load"] == [load, load]
    rows = page.rows(tmp_path)
    assert len(rows) == shown and all(row["figure"].reached for row in rows)


def test_every_claim_has_its_figure():
    assert {row["name"] for row in page.rows()} == set(page.CLAIMS)


def test_actions_share_cores():
    """Two trajectories of two turns on one core: generations of 1 s, actions of 2 s."""
    load = [[Step(1.0, 2.0, "tests")] * 2] * 2
    assert sorted(ActionSimulation(load, 1, "arrival").run().act_s) == [2.0, 3.0, 3.0, 4.0]
    assert ActionSimulation(load, 1, "reserved").run().makespan_s == 12.0


def test_kin_have_lengths_like_each_other():
    traces = [Trace(f"t{i}", 10, (TurnPlan(i + 1, "", "", 0, 0.0),)) for i in range(1000)]

    def spread(kinship):
        plans = draw_alike(traces, num_groups=100, group_size=4, seed=0, kinship=kinship).trajectories
        groups = [[plan.new_tokens for plan in plans[i : i + 4]] for i in range(0, 400, 4)]
        return sum(max(group) - min(group) for group in groups) / len(groups)

    assert spread(0.9) < 0.6 * spread(0.3) < 0.6 * spread(0.0)


def test_a_move_to_a_slower_engine_is_useless_and_one_to_a_faster_engine_is_worth_it():
    def log(*workers):
        key = "trajectory-train-0-0-0-e0-run"
        for worker, seconds in (("fast", 0.012), ("slow", 0.036)):
            yield facts.WorkerCapacity(worker, "tp1", 8, 0, 10_000, seconds, seconds, 1e-6)
        yield facts.TrajectoryParked(key, 0, Phase.ROLLOUT, 0)
        for number, worker in enumerate(workers):
            yield facts.QuantumDispatched(key, Phase.ROLLOUT, worker, number, (0,), "move: because", True)
            done = {"quantum": number, "worker": worker, "end": "eos" if number else ""}
            yield facts.QuantumFinished(key, Phase.ROLLOUT, 10, "", NO_TOOL, 0.1, **done)
        yield facts.TrajectoryEnded(key, True)

    for workers, useless in ((("fast", "slow"), True), (("slow", "fast"), False)):
        (moved,), dispatched = moves([facts.Line("run", 0.0, event) for event in log(*workers)])
        assert dispatched == 2 and (moved.useless, moved.worth) == (useless, not useless)


@pytest.mark.live
def test_forecasts_of_recorded_trajectories_are_scored():
    from benchmarks.virtual.length_skill import folds_of, read_traces, replay, scores, sets_in
    from libra.policy.posterior.forecaster import Posterior

    first, *_ = folds_of(read_traces(sets_in(DATA)["tau"]))
    forecaster = Posterior()
    assert all(map(math.isfinite, scores([one for group in first for one in replay(forecaster, group)]).values()))


@pytest.mark.live
def test_loops_in_emulated_time_keep_their_bound_and_repeat_themselves(tmp_path):
    import asyncio

    from benchmarks.learning.async_learning import loop_of

    small = ("trainer.prompts=2", "trainer.group_size=2", "rollout.max_turns=4", "run.eta=1", "staleness.versions=many")
    found, again = (asyncio.run(loop_of(small, 0, 3, 3, str(tmp_path / name)).run()) for name in "ab")
    assert found == again and len(found.published) == 3 and found.over_age == 0


@pytest.mark.live
def test_the_planner_at_a_small_size(capsys):
    from benchmarks.virtual import planner

    planner.main(["--json", "--gpus", "16", "--requests", "32", "--repeats", "1"])
    figures = figures_of(capsys.readouterr().out)
    assert 0 <= figures["gap_16_32"] < 0.05


@pytest.mark.live
def test_the_cost_model_on_files_of_any_name(tmp_path, capsys):
    from benchmarks.virtual import cost_model

    source = cost_model.EXCERPT / "frontier" / "compute_a800_meta-llama_Llama-2-7b-hf_mlp.csv"
    inside = tmp_path / "compute" / "a100" / "some" / "Model-7b"
    inside.mkdir(parents=True)
    (inside / "mlp.csv").write_text(source.read_text())
    cost_model.main(["--data", str(tmp_path), "--json"])
    assert "decode_mape/A100-80G/some_Model-7b" in figures_of(capsys.readouterr().out)
