"""``libra simulate``: what is printed, that it repeats, and that a saved workload is the same one."""

import json

import pytest

SMALL = ("trainer.prompts=4", "trainer.group_size=2", "planner.lengths.turns=3")


def test_policy_gpu_and_engines_are_those_of_their_own_sections(libra):
    own = ("policy.name=fifo", "planner.gpu=A100-80G", "cluster.engines=[{tp: 1, count: 3}]")
    code, out, err = libra("simulate", "libra/quickstart", *SMALL, *own)
    assert (code, err) == (0, "") and "tiny_arithmetic on A100-80G, 3 x tp1; fifo" in out


def test_json_repeats_and_a_saved_workload_gives_the_same(libra, tmp_path):
    saved = tmp_path / "w.json"
    _, first, _ = libra("simulate", "libra/quickstart", *SMALL, "--json", "--save-workload", saved)
    _, again, _ = libra("simulate", "libra/quickstart", *SMALL, "--json", "--workload", saved)
    first, again = json.loads(first), json.loads(again)
    assert first["digest"] == again["digest"] and first["makespan_s"] == again["makespan_s"] > 0
    assert first["source"] == "synthetic" and again["source"] == str(saved)


def test_mixed_layouts_and_policies_are_simulated(libra):
    for policy in ("cmlfq", "fifo", "benchmarks.orderings:Paper"):
        layout = ("rollout.engine=vllm", "cluster.engines=[{tp: 2}, {tp: 4}]")
        code, out, _ = libra("simulate", "libra/quickstart", *SMALL, *layout, f"policy.name={policy}", "--json")
        assert code == 0 and json.loads(out)["trajectories"] == 8


def test_before_anything_was_measured_it_agrees_with_the_plan(libra):
    code, out, _ = libra("simulate", "libra/quickstart", "--json")
    simulated = json.loads(out)
    turns = 4  # planner.lengths.turns, below rollout.max_turns
    assert (code, simulated["trajectories"], simulated["turns"]) == (0, 128, 128 * turns)
    planned = json.loads(libra("plan", "libra/quickstart", "--json")[1])
    assert simulated["makespan_s"] == pytest.approx(planned["rollout_s"], rel=0.25)


def test_one_engine_has_nothing_to_share_out(libra):
    alone = ("run.eta=1", "staleness.versions=one", "staleness.engines=rounded")
    _, _, err = libra("config", "libra/quickstart", *alone)
    assert "staleness.engines" in err and "more than one engine" in err
