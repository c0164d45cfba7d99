"""``libra simulate``: what is printed, that it repeats, and that a saved workload is the same one."""

import json
from collections.abc import Callable

import pytest

from libra.cli.main import main
from libra.errors import ConfigError
from libra.sim.disciplines import DISCIPLINES, OTHER_NAMES, disciplines, named

SMALL = ("trainer.prompts=4", "trainer.group_size=2", "simulation.turns=3")
Libra = Callable[..., tuple[int, str, str]]


@pytest.fixture
def libra(capsys):
    """The command in this process: its exit code, standard output and standard error."""

    def call(*arguments):
        with pytest.raises(SystemExit) as stopped:
            main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return int(stopped.value.code or 0), out, err

    return call


def test_what_section_simulation_leaves_out_is_the_runs(libra):
    own = ("policy.name=fifo", "planner.gpu=A100-80G", "cluster.engines=[{tp: 1, count: 3}]")
    code, out, err = libra("simulate", "libra/quickstart", *SMALL, *own)
    assert (code, err) == (0, "") and "tiny_arithmetic on A100-80G, 3 x tp1; fifo" in out
    named = ("simulation.policy=mlfq", "simulation.gpu=A800-80G", "simulation.layout={tp1: 1}")
    code, out, err = libra("simulate", "libra/quickstart", *SMALL, *own, *named)
    assert code == 0 and "tiny_arithmetic on A800-80G, 1 x tp1; mlfq" in out
    assert "policy.name=fifo" in err and "planner.gpu=A100-80G" in err and "no effect" in err


def test_json_repeats_and_a_saved_workload_gives_the_same(libra, tmp_path):
    saved = tmp_path / "w.json"
    _, first, _ = libra("simulate", "libra/quickstart", *SMALL, "--json", "--save-workload", saved)
    _, again, _ = libra("simulate", "libra/quickstart", *SMALL, "--json", "--workload", saved)
    first, again = json.loads(first), json.loads(again)
    assert first["digest"] == again["digest"] and first["makespan_s"] == again["makespan_s"] > 0
    assert first["source"] == "synthetic" and again["source"] == str(saved)


def test_mixed_layouts_and_policies_are_simulated(libra):
    for policy in ("cmlfq", "fifo", "benchmarks.orderings:Paper"):
        layout = "simulation.layout={tp2: 1, tp4: 1}"
        code, out, _ = libra("simulate", "libra/quickstart", *SMALL, layout, f"simulation.policy={policy}", "--json")
        assert code == 0 and json.loads(out)["trajectories"] == 8


def test_systems_are_compared_with_the_best_static_one(libra, tmp_path):
    picture = tmp_path / "systems.html"
    given = (*SMALL, "simulation.model=Qwen3-14B", "--against", "turning", "--gpus", "4", "--seeds", 1)
    code, out, err = libra("simulate", "libra/quickstart", *given, "--plot", picture, "--json")
    assert (code, err) == (0, "")
    (each,) = json.loads(out)["comparisons"]
    names = {row["system"]: row for row in each["systems"]}
    assert set(names) == {"colocated", "colocated_preempting", "split", "turning"}
    assert max(row["over_best_static"] for row in each["systems"] if row["static"]) == 1.0
    assert 0 < max(row["of_bound"] for row in each["systems"]) < 1
    for row in each["systems"]:
        assert sum(row["gpu_frac"].values()) == pytest.approx(1.0)
        assert row["gpu_frac"]["training"] > 0 and row["gpu_frac_95"].keys() == row["gpu_frac"].keys()
    assert names["colocated"]["gpu_frac"]["change of role"] > 0 == names["split"]["gpu_frac"]["change of role"]
    assert "colocated" in picture.read_text() and "https://" not in picture.read_text().split("<script")[0]


def test_systems_are_found_by_the_names_that_others_give_them():
    assert named(["streamrl", "ours", "oracle", "turning"], 0) == [
        "streaming", "turning", "turning_kv", "turning_cmlfq", "turning_kv_cmlfq", "turning_oracle",
    ]  # fmt: skip
    assert named(["verl"], 0) == ["colocated"] and named(["verl", "areal"], 1) == ["verl_async", "bounded"]
    for name, meant in OTHER_NAMES.items():
        assert name not in DISCIPLINES and set(meant) <= DISCIPLINES.keys()
        assert any(disciplines(named([name], eta), eta) for eta in (0, 1, 2))
    with pytest.raises(ConfigError, match="streamrl"):
        disciplines(["streamlr"], 0)
