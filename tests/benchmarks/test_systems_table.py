"""The table of training systems: each is scored beside the best static one, and found by the names
that others give it."""

import json

import pytest

from benchmarks.systems import table
from benchmarks.systems.disciplines import DISCIPLINES, OTHER_NAMES, disciplines, named
from libra.errors import ConfigError


def test_systems_are_compared_with_the_best_static_one(monkeypatch, capsys):
    given = ("model.path=Qwen3-14B", "--against", "turning", "--gpus", "4", "--seeds", "1", "--json")
    small = ("trainer.prompts=4", "trainer.group_size=2", "planner.lengths.turns=3")
    monkeypatch.setattr("sys.argv", ["systems", "libra/quickstart", *small, *given])
    table.main()
    (each,) = json.loads(capsys.readouterr().out)["comparisons"]
    names = {row["system"]: row for row in each["systems"]}
    assert set(names) == {"colocated", "colocated_preempting", "split", "turning"}
    assert max(row["over_best_static"] for row in each["systems"] if row["static"]) == 1.0
    assert 0 < max(row["of_bound"] for row in each["systems"]) < 1
    for row in each["systems"]:
        assert sum(row["gpu_frac"].values()) == pytest.approx(1.0)
        assert row["gpu_frac"]["training"] > 0 and row["gpu_frac_95"].keys() == row["gpu_frac"].keys()
    assert names["colocated"]["gpu_frac"]["change of role"] > 0 == names["split"]["gpu_frac"]["change of role"]


def test_systems_are_found_by_the_names_that_others_give_them():
    assert named(["streamrl", "ours", "oracle", "turning"], 0) == [
        "streaming", "turning", "turning_kv", "turning_cmlfq", "turning_kv_cmlfq", "turning_oracle",
    ]  # fmt: skip
    assert named(["verl"], 0) == ["colocated"] and named(["areal"], 1) == ["bounded"]
    for name, meant in OTHER_NAMES.items():
        assert name not in DISCIPLINES and set(meant) <= DISCIPLINES.keys()
        assert any(disciplines(named([name], eta), eta) for eta in (0, 1, 2))
    with pytest.raises(ConfigError, match="streamrl"):
        disciplines(["streamlr"], 0)


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("--against openrlhf", "colocated"), ("--against bounded", "run.eta"),
        ("--gpus 1", "3 or more"), ("run.eta=3", "0, 1, 2"),
    ],
)  # fmt: skip
def test_a_table_that_cannot_be_made_is_refused(typed, said, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["systems", "libra/quickstart", *typed.split()])
    with pytest.raises(SystemExit):
        table.main()
    assert said in capsys.readouterr().err
