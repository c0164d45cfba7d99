"""Runs with a teacher: it is loaded once on a worker of its own, its scores are committed, and the student comes nearer to it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from libra.config import RunConfig
from libra.driver.session import Session

Config = Callable[..., RunConfig]


@pytest.fixture(scope="module")
def teacher(random_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with the tokenizer of the random one, other weights, and clear opinions."""
    directory = tmp_path_factory.mktemp("teacher")
    model = AutoModelForCausalLM.from_pretrained(random_model)
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.2)
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(random_model).save_pretrained(directory)
    return directory


def distilling(make_config: Config, teacher: Path, distil: dict[str, Any], **sections: dict[str, Any]) -> RunConfig:
    trainer = {"algorithm": "opd", "prompts": 2, "group_size": 4, "lr": 3e-3} | sections.pop("trainer", {})
    sections.setdefault("run", {"iterations": 4})
    return make_config(trainer=trainer, distil={"teacher": str(teacher)} | distil, **sections)


@pytest.mark.parametrize(
    "distil",
    [
        {"top_k": 16},
        {"top_k": 16, "divergence": "reverse"},
        {"estimator": "sampled", "samples": 8},
        {"estimator": "sampled", "samples": 8, "divergence": "reverse"},
    ],
    ids=["forward-top_k", "reverse-top_k", "forward-sampled", "reverse-sampled"],
)
def test_the_student_comes_nearer_to_its_teacher(make_config: Config, teacher: Path, distil: dict[str, Any]) -> None:
    config = distilling(make_config, teacher, distil, run={"iterations": 12})
    with Session(config) as session:
        rows = list(session.iterations())
    assert rows[-1]["kl_teacher"] < 0.8 * rows[0]["kl_teacher"]
