"""One smoke of each benchmark: it runs at a small size and its figures are possible. Their helpers are not tested."""

import asyncio
import io
import json
import math
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import cmlfq_sim, cost_model, plan_loop, planner, uneven_engines
from benchmarks.action_loads import ActionSimulation, Step
from benchmarks.compiled import built
from benchmarks.divided import JOBS, simulate
from benchmarks.dora import FITTED, cell_of
from benchmarks.earl_fig3 import earl_figures
from benchmarks.elastic_drift import NODE, UPDATE_S, Course, best_static, node_layouts
from benchmarks.forecasters import GlobalMean, PaperTree, TurnIndex
from benchmarks.late import DELAYS, PUBLISHED, bias_figures
from benchmarks.length_replay import replay, scores
from benchmarks.length_skill import folds_of
from benchmarks.pipeline_live import SIDES, configured
from benchmarks.report import DATA, MIN_PAIRS, QUICKSTART, Figure, alternate, emit, machine
from benchmarks.service_loads import MAX_WAIT_S, Asked, asked_all
from benchmarks.systems.disciplines import DISCIPLINES
from benchmarks.systems.tuning import Setting, play
from libra.config import config_from_dict, dump_config, load_config
from libra.config.model_paths import resolve_model
from libra.config.streaming import most_waves, turns
from libra.errors import ConfigError
from libra.hardware import load_gpu, load_shape
from libra.planner.build_plan import plan
from libra.planner.cost import TrajectoryTotals
from libra.planner.replan import Rules
from libra.planner.search import Planner
from libra.planner.snapshot import PlanningSnapshot
from libra.sim.workload import Workload

ROOT = Path(__file__).parents[2]


def figures_of(out):
    """Values of the last line that a benchmark printed."""
    return {name: figure["value"] for name, figure in json.loads(out.splitlines()[-1])["figures"].items()}


def test_the_last_line_of_a_report_is_the_contract_and_sides_take_turns():
    stream = io.StringIO()
    figures = {"ratio": Figure(1.5, "ratio", "higher", 2.0)}
    emit("vs_trl", figures, arguments=("--json", "--pairs", "7"), as_json=True, stream=stream)
    assert json.loads(stream.getvalue().splitlines()[-1]) == {
        "benchmark": "vs_trl", "machine": machine(), "command": "python -m benchmarks.vs_trl --json --pairs 7",
        "figures": {"ratio": {"value": 1.5, "unit": "ratio", "better": "higher", "goal": 2.0}},
    }  # fmt: skip
    assert not figures["ratio"].reached
    order = []
    assert alternate(lambda: order.append("A") or 4.0, lambda: order.append("B") or 2.0, pairs=MIN_PAIRS).ratio == 2.0
    assert order == ["A", "B"] * MIN_PAIRS
    with pytest.raises(ConfigError):
        alternate(lambda: 1.0, lambda: 1.0, pairs=MIN_PAIRS - 1)


def test_actions_share_cores_and_services_devices():
    """Two trajectories of two turns on one core: generations of 1 s, actions of 2 s."""
    load = [[Step(1.0, 2.0, "tests")] * 2] * 2
    assert sorted(ActionSimulation(load, 1, "arrival").run().act_s) == [2.0, 3.0, 3.0, 4.0]
    assert ActionSimulation(load, 1, "reserved").run().makespan_s == 12.0
    alone = asked_all([Asked(60.0 * n, n % 10, 1.0) for n in range(30)], 10)
    assert alone.act_s == pytest.approx([1.0 + MAX_WAIT_S] * 30)


@pytest.mark.live
def test_both_sides_of_losses_compute_the_same():
    import torch

    from benchmarks.losses import LOSSES, Work

    for loss in LOSSES:
        work = Work(sequences=3, tokens=5, vocab=17, hidden=4, device="cpu")
        gradients = []
        for side in ("chunked", "plain"):
            assert work.run(loss, side, chunk_tokens=4) > 0
            gradients.append((work.hidden_NH.grad.clone(), work.weight_VH.grad.clone()))
        for ours, plain in zip(*gradients, strict=True):
            torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-6)


def test_pipeline_live_has_one_side_without_streaming_one_with_and_one_that_turns(tmp_path):
    configs = {side: configured(tmp_path, tmp_path, "a", side, 2) for side in SIDES}
    assert {side: (most_waves(each) > 0, turns(each)) for side, each in configs.items()} == {
        "off": (False, False), "streaming": (True, False), "turning": (True, True),
    }  # fmt: skip


def test_the_yardstick_of_elastic_drift_is_the_best_static_split():
    course = Course([Workload("sim", ())] * 3, {}, {})
    for k in range(3):
        course.trainings[k] = {NODE * nodes: 80.0 / nodes for nodes in (1, 2, 3, 4)}
        for nodes, seconds in {1: 300.0, 2: 150.0, 3: 100.0, 4: 75.0}.items():
            for layout in node_layouts(nodes):
                course.rollouts[k, tuple(sorted(layout.items()))] = seconds * (1.0 if len(layout) == 1 else 1.1)
    assert best_static(course, 0).total_s == pytest.approx(3 * (100.0 + 80.0 + UPDATE_S))
    assert best_static(course, 1).total_s == pytest.approx(100.0 + 2 * 100.0 + 80.0 + 3 * UPDATE_S)


@pytest.mark.live
def test_forecasters_are_scored_on_tasks_that_they_have_not_seen():
    from benchmarks.agent_traces import read_traces, sets_in

    first, *_ = folds_of(read_traces(sets_in(DATA)["tau"]))
    for forecaster in (GlobalMean(), TurnIndex(), PaperTree()):
        assert all(map(math.isfinite, scores(replay(forecaster, first, 8)).values()))


@pytest.mark.live
def test_the_published_reductions_of_late_rewards():
    figures = bias_figures()
    for delay, published in zip(DELAYS, PUBLISHED, strict=True):
        assert figures[f"bias_reduction_{delay}"].value == pytest.approx(published, abs=0.005)
    assert figures["exact_law_error"].value < 1e-12


@pytest.mark.live
def test_loops_in_emulated_time_keep_their_bound_and_repeat_themselves(tmp_path):
    from benchmarks.async_learning import loop_of
    from benchmarks.late_loop import LateLoop

    small = ("trainer.prompts=2", "trainer.group_size=2", "rollout.max_turns=4", "run.eta=1", "staleness.versions=many")
    found, again = (asyncio.run(loop_of(small, 0, 3, 3, str(tmp_path / name)).run()) for name in "ab")
    assert found == again and len(found.published) == 3 and found.over_age == 0
    late = (
        "trainer.prompts=2",
        "trainer.group_size=4",
        "rollout.max_turns=2",
        "run.iterations=2",
        "trainer.late=correct",
    )
    loop = LateLoop(load_config(QUICKSTART, late), tmp_path / "late", delay=1)
    asyncio.run(loop.run())
    assert loop.counted > 0


@pytest.mark.live
def test_distillation_and_old_log_probabilities(capsys):
    from benchmarks import distil, old_logp

    small = "--runs 12 --places 2 --steps 2 --seeds 1 --sequences 4 --tokens 6 --samples 8 --lag 1"
    distil.main([*small.split(), "--json"])
    assert 0.5 / 64 < figures_of(capsys.readouterr().out)["variance_ratio_m64"] < 2 / 64
    size = {"dtype": "float64", "eta": 2, "steps": 1, "groups": 2, "group-size": 2, "generated-tokens": 12}
    old_logp.main(["--json", *(text for name, value in size.items() for text in (f"--{name}", str(value)))])
    figures = figures_of(capsys.readouterr().out)
    assert figures["coverage"] == 1.0 and figures["largest_gap"] < 1e-6


@pytest.mark.live
def test_a_recorded_step_in_waves_is_the_whole_step(tmp_path):
    from benchmarks.random_training import random_trajectories
    from benchmarks.streamed_gradients import apart
    from libra.store.run_records import commit_batch
    from libra.store.trajectory_store import TrajectoryStore
    from libra.train import Replica, TrainSettings
    from libra.weights import WeightStore

    waves, directory = [[2, 0], [1], [5, 3, 4]], tmp_path / "demo"
    trainer = {"prompts": 6, "group_size": 2, "streaming": "on", "lr": 1e-3, "mismatch_action": "warn"}
    config = config_from_dict({"trainer": trainer})
    directory.mkdir()
    (directory / "config.resolved.yaml").write_text(dump_config(config))
    replica = Replica(Path(resolve_model(config.model.path)), TrainSettings.of_run(config))
    WeightStore(directory / "weights").publish(0, replica.weights())
    members = random_trajectories(6, 40, 8, 90)
    rows = [
        {"iteration": 0, "group": g, "path": "", "advantages": [members[g].advantage], "trains": [True], "wave": w}
        for w, wave in enumerate(waves)
        for g in wave
    ]
    commit_batch(directory / "batches", 0, [members[row["group"]].trajectory_id for row in rows], groups=rows)
    with TrajectoryStore.create(directory / "trajectories.zarr") as stored:
        stored.append(members, batch=0)
    found = apart(directory, 0, 1)
    assert found.equal and found.waves == 3 and found.grad_norm > 1e-3


@pytest.mark.live
def test_the_planner_at_a_small_size(tmp_path, capsys):
    trace, rng = tmp_path / planner.TRACE, np.random.default_rng(0)
    trace.parent.mkdir()
    rows = ["task,sample,turn,prompt_tokens,completion_tokens"]
    rows += [f"t{task},0,{turn},{1000 + 800 * turn},{rng.integers(50, 900)}" for task in range(30) for turn in range(5)]
    trace.write_text("\n".join(rows))
    planner.main(["--json", "--data", str(tmp_path), "--gpus", "16", "--requests", "32", "--repeats", "1"])
    figures = figures_of(capsys.readouterr().out)
    assert 0 <= figures["gap_16_32"] < 0.05 and "regret_tp_16_32" in figures


@pytest.mark.live
def test_the_planning_loop_shares_where_it_pays():
    lengths = TrajectoryTotals.of(512.0, np.linspace(400, 4000, 48), observation_tokens=8000.0)
    snapshot = PlanningSnapshot(load_gpu("A800-80G"), load_shape("Qwen3-0.6B"), 8, lengths, tp=(1, 2), eta=0)
    split = plan(snapshot)
    loop = plan_loop.PlanLoop(
        snapshot, plan_loop.split_plan(snapshot, Planner()).deployed, Rules(confirmations=1, first_cost_s=0.0),
        plan_loop.Sharing(1, 0, 0.1),
    )  # fmt: skip
    outcome = loop.after(0, split.rollout_s, split.train_s, lengths, 20)
    assert outcome.considered.accepted and outcome.proposed.deployed.shared_gpus == 7


@pytest.mark.live
def test_the_cost_model_on_files_of_any_name(tmp_path, capsys, monkeypatch):
    source = Path(cost_model.EXCERPT) / "frontier" / "compute_a800_meta-llama_Llama-2-7b-hf_mlp.csv"
    inside = tmp_path / "compute" / "a100" / "some" / "Model-7b"
    inside.mkdir(parents=True)
    (inside / "mlp.csv").write_text(source.read_text())
    monkeypatch.setattr(sys, "argv", ["cost_model", "--data", str(tmp_path), "--json"])
    cost_model.main()
    assert "linear_mape/A100-80G/some_Model-7b" in figures_of(capsys.readouterr().out)
    figures, _ = earl_figures()
    assert figures["earl_signs"].value >= 12 and figures["earl_oom_right"].reached


@pytest.mark.live
def test_simulated_systems_stand_in_their_order():
    job = JOBS["moonlight"]
    runs = {system: simulate(job, system, 0, 8192).seconds for system in ("static", "arrival", "oracle")}
    assert runs["static"] > runs["arrival"] > runs["oracle"]

    def seconds(factor):
        cell = replace(cell_of(FITTED._replace(gpus=32), factor, 4), groups=8, group_size=4)
        return play(cell, DISCIPLINES["colocated"], Setting(0, 4, 4.0), 1, causes=False).step_s(1)

    one, two, three = (seconds(factor) for factor in (1.0, 2.0, 3.0))
    assert two > one and three - two == pytest.approx(two - one, rel=1e-6)
    traces = str(Path(cmlfq_sim.__file__).parent / "data" / "agent_turns" / "tau_airline_gpt4o.csv")
    paper = cmlfq_sim.Job(traces, 0.55, 16, 1, "paper", ((2, 8),), 0)
    assert cmlfq_sim.alike(paper).policy == "fifo" and cmlfq_sim.simulate(paper)[0] > 0


@pytest.mark.live
def test_releasing_slots_on_uneven_engines_gains(monkeypatch):
    monkeypatch.setattr(uneven_engines, "ITERATIONS", 2)
    fleet, logs = uneven_engines.FLEETS["1_4"], []
    for seed in range(2):
        workload = uneven_engines.workload_of("synthetic", uneven_engines.PER_ENGINE * len(fleet), seed)
        kept, released = (uneven_engines.seconds(rule, workload, fleet, 4, 6, seed) for rule in ("kept", "seconds"))
        logs.append(math.log(released / kept))
    assert math.exp(sum(logs) / len(logs)) < 0.95


@pytest.mark.live
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler; type: apt-get install gcc")
def test_a_module_is_compiled_and_runs_from_the_copy(tmp_path):
    folder = built(tmp_path / "copy", ("libra/sim/agenda.py",))
    path = os.environ | {"PYTHONPATH": str(folder), "PYTHONSAFEPATH": "1"}
    code = "import libra.sim.agenda as compiled; compiled.Agenda(); print(compiled.__file__)"
    said = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=path, capture_output=True, text=True, check=True)
    assert said.stdout.strip().startswith(str(folder)) and said.stdout.strip().endswith(".so")


def test_what_is_measured_is_finite():
    figure = Figure
    for number in (math.nan, math.inf):
        with pytest.raises(ValueError, match="finite"):
            figure(number, "ratio", "higher", 1.0)
