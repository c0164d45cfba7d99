"""An algorithm fills the keys that were not given, and nothing else."""

from dataclasses import asdict

import pytest

from libra.config import config_from_dict, dump_config, load_config
from libra.config.algorithms import ALGORITHMS, DEFAULT_ALGORITHM, preset_values
from libra.config.trainer import TrainerSection


def chosen(name):
    """What to type for an algorithm, with what it cannot be without."""
    return [f"trainer.algorithm={name}", *(["distil.teacher=libra/tiny-arithmetic"] if name == "opd" else [])]


def test_the_defaults_of_the_fields_are_the_default_algorithm():
    for name, value in preset_values(DEFAULT_ALGORITHM).items():
        assert TrainerSection.model_fields[name].default == value, name


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_preset_fills_what_was_not_given(name):
    trainer = config_from_dict({}, chosen(name)).trainer.model_dump()
    assert {key: trainer[key] for key in preset_values(name)} == asdict(ALGORITHMS[name].preset)
    given = config_from_dict({}, [*chosen(name), "trainer.clip_high=0.7"]).trainer
    assert given.clip_high == 0.7
    assert given.clip_low == ALGORITHMS[name].preset.clip_low


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_resolved_configuration_says_every_value_and_reads_back(name):
    config = config_from_dict({}, chosen(name))
    assert f"clip_low: {config.trainer.clip_low}" in dump_config(config)
    assert config_from_dict(config.model_dump(mode="json")) == config


@pytest.mark.parametrize("name", ALGORITHMS)
def test_another_algorithm_over_a_resolved_configuration_is_that_algorithm(name, tmp_path):
    resolved = tmp_path / "config.resolved.yaml"
    resolved.write_text(dump_config(config_from_dict({}, ["trainer.algorithm=ppo_decoupled", "trainer.lr=0.5"])))
    expected = config_from_dict({}, [*chosen(name), "trainer.lr=0.5"])
    assert load_config(resolved, chosen(name)) == expected
    assert load_config(resolved, chosen(name)[1:], values={"trainer": {"algorithm": name}}) == expected
    kept = config_from_dict({"trainer": {"algorithm": name, "clip_high": 0.7}}, chosen(name))
    assert kept.trainer.clip_high == 0.7
