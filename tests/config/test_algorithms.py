"""An algorithm fills the keys that were not given, and nothing else."""

from __future__ import annotations

from dataclasses import asdict, fields
from pathlib import Path
from typing import get_args

import pytest
from doc_pages import algorithms_markdown

from libra.config import config_from_dict, dump_config, load_config
from libra.config.algorithms import ALGORITHMS, DEFAULT_ALGORITHM, AlgorithmName, Preset, preset_values
from libra.config.trainer import TrainerSection
from libra.errors import ConfigError


def chosen(name: str) -> list[str]:
    """What to type for an algorithm, with what it cannot be without."""
    return [f"trainer.algorithm={name}", *(["distil.teacher=libra/tiny-arithmetic"] if name == "opd" else [])]


def test_the_table_has_every_name() -> None:
    assert tuple(ALGORITHMS) == get_args(AlgorithmName)


def test_the_defaults_of_the_fields_are_the_default_algorithm() -> None:
    for name, value in preset_values(DEFAULT_ALGORITHM).items():
        assert TrainerSection.model_fields[name].default == value, name


def test_preset_keys_are_marked_in_the_reference() -> None:
    marked = {name for name, field in TrainerSection.model_fields.items() if "(preset)" in (field.description or "")}
    assert marked - {"algorithm"} == {field.name for field in fields(Preset)}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_preset_fills_what_was_not_given(name: AlgorithmName) -> None:
    trainer = config_from_dict({}, chosen(name)).trainer.model_dump()
    assert {key: trainer[key] for key in preset_values(name)} == asdict(ALGORITHMS[name].preset)
    given = config_from_dict({}, [*chosen(name), "trainer.clip_high=0.7"]).trainer
    assert given.clip_high == 0.7
    assert given.clip_low == ALGORITHMS[name].preset.clip_low


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_resolved_configuration_says_every_value_and_reads_back(name: AlgorithmName) -> None:
    config = config_from_dict({}, chosen(name))
    assert f"clip_low: {config.trainer.clip_low}" in dump_config(config)
    assert config_from_dict(config.model_dump(mode="json")) == config


@pytest.mark.parametrize("name", ALGORITHMS)
def test_another_algorithm_over_a_resolved_configuration_is_that_algorithm(name: AlgorithmName, tmp_path: Path) -> None:
    resolved = tmp_path / "config.resolved.yaml"
    resolved.write_text(dump_config(config_from_dict({}, ["trainer.algorithm=ppo_decoupled", "trainer.lr=0.5"])))
    expected = config_from_dict({}, [*chosen(name), "trainer.lr=0.5"])
    assert load_config(resolved, chosen(name)) == expected
    assert load_config(resolved, chosen(name)[1:], values={"trainer": {"algorithm": name}}) == expected
    kept = config_from_dict({"trainer": {"algorithm": name, "clip_high": 0.7}}, chosen(name))
    assert kept.trainer.clip_high == 0.7


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["trainer.algorithm=opo", "run.eta=1"], "type trainer.loss=ppo"),
        (["trainer.loss=reinforce", "trainer.minibatches=2"], "type trainer.loss=ppo"),
        (["trainer.correction=mask"], "type trainer.old_logp=proximal"),
        (["trainer.aggregation=constant"], "type e.g. trainer.loss_divisor=10000"),
        (["trainer.algorithm=cispo", "trainer.dual_clip=3.0"], "type trainer.dual_clip=null"),
        (["trainer.log_ratio_coef=0.1"], "type trainer.log_ratio_coef=0"),
        (["trainer.algorithm=ppo_decoupled", "trainer.correction_low=9.0"], "type trainer.correction_low=5.0 or less"),
        (
            ["trainer.group_size=1", "trainer.normalize_std=false", "trainer.drop_uniform_groups=true"],
            "type trainer.drop_uniform_groups=false",
        ),
        (["trainer.algorithm=gpro"], "trainer.algorithm"),
    ],
)
def test_what_cannot_work_is_refused(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_from_dict({}, overrides)
    assert said in str(caught.value)


def test_the_page_in_docs_is_up_to_date(repository: Path) -> None:
    assert (repository / "docs/algorithms.md").read_text() == algorithms_markdown(), "type: make docs"


def test_the_page_names_every_algorithm_with_its_source() -> None:
    for name, algorithm in ALGORITHMS.items():
        assert f"| `{name}` | {algorithm.what} | {algorithm.when} | {algorithm.source} |" in algorithms_markdown()
        assert "arXiv:" in algorithm.source
