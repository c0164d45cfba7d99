"""An algorithm fills the keys that were not given, and nothing else."""

import inspect

import pytest

from libra.config import config_from_dict, dump_config, load_config
from libra.config.algorithms import ALGORITHMS, DEFAULT_ALGORITHM, LOSS_ARGS, preset_values
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
    assert {key: trainer[key] for key in preset_values(name)} == preset_values(name)
    given = config_from_dict({}, [*chosen(name), "trainer.correction_args.low=0.7"]).trainer
    assert given.correction_args == trainer["correction_args"] | {"low": 0.7}


def test_arguments_of_a_loss_are_merged_one_by_one_and_go_with_it():
    given = config_from_dict({}, ["trainer.algorithm=gspo", "trainer.loss_args.clip_high=0.7"]).trainer
    assert (given.loss_args["clip_low"], given.loss_args["clip_high"]) == (3e-4, 0.7)
    other = config_from_dict({"trainer": {"loss_args": {"clip_high": 0.7}}}, ["trainer.loss=sapo"]).trainer
    assert other.loss_args == LOSS_ARGS["sapo"]().model_dump()


@pytest.mark.parametrize("loss", sorted(set(LOSS_ARGS) - {"reinforce"}))
def test_the_arguments_of_a_loss_are_those_of_its_function(loss):
    from libra.train import losses

    given = inspect.signature(getattr(losses, f"{loss}_loss")).parameters
    passed_on = losses.gated_surrogate if loss == "sapo" else losses.clipped_surrogate
    parameters = {**inspect.signature(passed_on).parameters, **given} if {"clips", "taus"} & set(given) else given
    for name, value in LOSS_ARGS[loss]().model_dump().items():
        assert parameters[name].default == value, name


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_resolved_configuration_says_every_value_and_reads_back(name):
    config = config_from_dict({}, chosen(name))
    assert f"high: {config.trainer.correction_args['high']}" in dump_config(config)
    assert config_from_dict(config.model_dump(mode="json")) == config


@pytest.mark.parametrize("name", ALGORITHMS)
def test_another_algorithm_over_a_resolved_configuration_is_that_algorithm(name, tmp_path):
    resolved = tmp_path / "config.resolved.yaml"
    resolved.write_text(dump_config(config_from_dict({}, ["trainer.algorithm=ppo_decoupled", "trainer.lr=0.5"])))
    expected = config_from_dict({}, [*chosen(name), "trainer.lr=0.5"])
    assert load_config(resolved, chosen(name)) == expected
    assert load_config(resolved, chosen(name)[1:], values={"trainer": {"algorithm": name}}) == expected
    assert config_from_dict({"trainer": {"algorithm": name, "kl_coef": 0.7}}, chosen(name)).trainer.kl_coef == 0.7
