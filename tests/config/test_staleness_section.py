"""Section ``staleness``: one bound under two names, and what contradicts it."""

from __future__ import annotations

from pathlib import Path

import pytest

from libra.config import config_from_dict, dump_config, load_config
from libra.config.effect_conditions import Situation
from libra.config.effects import ignored_settings
from libra.errors import ConfigError


@pytest.mark.parametrize("name", ["run.eta", "staleness.eta"])
def test_the_bound_has_two_names_and_one_value(name: str) -> None:
    config = config_from_dict({}, [f"{name}=3"])
    assert (config.run.eta, config.staleness.eta) == (3, 3)


def test_two_bounds_are_refused_by_both_values() -> None:
    with pytest.raises(ConfigError, match=r"staleness.eta.*: 1, and run.eta=2 is the same bound; type one of them"):
        config_from_dict({}, ["run.eta=2", "staleness.eta=1"])
    assert config_from_dict({}, ["run.eta=2", "staleness.eta=2"]).run.eta == 2


def test_a_later_layer_replaces_the_bound_under_either_name(tmp_path: Path) -> None:
    (tmp_path / "below.yaml").write_text(dump_config(config_from_dict({}, ["run.eta=1"])))
    for name in ("run.eta", "staleness.eta"):
        config = load_config(tmp_path / "below.yaml", [f"{name}=2"])
        assert (config.run.eta, config.staleness.eta) == (2, 2)


def test_a_wrong_bound_is_one_problem() -> None:
    with pytest.raises(ConfigError, match=r"^staleness.eta .*got -1.*at least 0"):
        config_from_dict({}, ["staleness.eta=-1"])


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            ["run.eta=1", "staleness.in_flight=3"],
            "staleness.in_flight.*: 3 batches, and run.eta=1 lets 2 be .*run.eta=2",
        ),
        (
            ["run.eta=1", "staleness.window=3"],
            "staleness.window.*: 3 versions, and staleness.over_age=wait with run.eta=1 lets 2",
        ),
        (
            ["run.eta=1", "staleness.over_age=drop", "trainer.streaming=auto"],
            "own iteration, which are never over age; type trainer.streaming=off",
        ),
        (
            ["run.eta=1", "staleness.over_age=correct", "trainer.old_logp=proximal"],
            "nothing corrects a stale token; type trainer.correction=truncate",
        ),
        (
            ["run.eta=1", "staleness.over_age=correct", "trainer.old_logp=version", "trainer.correction=truncate"],
            "trainer.old_logp=version keeps the weights of run.eta versions",
        ),
        (
            ["run.eta=1", "staleness.over_age=mask", "trainer.algorithm=reinforce_pp", "trainer.gamma=0.9"],
            "with trainer.gamma=0.9 the trainer needs all members",
        ),
    ],
)
def test_contradictions_name_the_fields_and_what_to_type(given: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        config_from_dict({}, given)


def test_what_is_never_over_age_has_no_verdict() -> None:
    for around, told in (([], True), (["run.eta=1"], False)):
        config = config_from_dict({}, ["staleness.over_age=drop", *around])
        assert bool(ignored_settings(config, Situation("run"))) == told
    window = config_from_dict({}, ["run.eta=1", "staleness.over_age=drop", "staleness.window=9"])
    assert window.staleness.window == 9
