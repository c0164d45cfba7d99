"""The code of docs/own_environment.md: excerpts are what the workflows have, and the rest runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from distributed import Client

import libra
from libra.errors import LibraError
from libra.named_parts import named_part

BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
EXCERPT = re.compile(r"# (workflows/\w+\.py)\n")


@pytest.fixture(scope="module")
def blocks(repository: Path) -> list[str]:
    return BLOCK.findall((repository / "docs" / "own_environment.md").read_text())


@pytest.fixture(scope="module")
def page(blocks: list[str]) -> dict[str, Any]:
    """The names that the page defines; in no module, so that workers get them by value."""
    names: dict[str, Any] = {"__name__": "page_of_own_environment"}
    for block in blocks:
        if not EXCERPT.match(block):
            exec(compile(block, "docs/own_environment.md", "exec"), names)
    return names


def test_excerpts_are_in_the_workflows(blocks: list[str], repository: Path) -> None:
    excerpts = [(found[1], block[found.end() :]) for block in blocks if (found := EXCERPT.match(block))]
    assert len(excerpts) >= 4
    for file, text in excerpts:
        assert text in (repository / file).read_text(), file


def test_each_workflow_of_an_own_part_has_at_most_forty_lines(repository: Path) -> None:
    for name in ("own_loss", "own_policy", "own_engine", "own_loader", "text_game"):
        assert len((repository / "workflows" / f"{name}.py").read_text().splitlines()) <= 40, name


def test_everything_that_the_page_names_is_there(repository: Path) -> None:
    text = (repository / "docs" / "own_environment.md").read_text()
    for dotted in set(re.findall(r"`(libra(?:\.[A-Za-z_]\w*)+)`", text)) - {"libra.train"}:
        module, _, attribute = dotted.rpartition(".")
        try:
            named_part("page", f"{module}:{attribute}")
        except LibraError:
            __import__(dotted)


def test_the_environment_keeps_its_contract(page: dict[str, Any]) -> None:
    contract = page["TestLetters"]()
    for name in dir(contract):
        if name.startswith("test_"):
            getattr(contract, name)()


def test_a_run_with_the_environment_the_node_and_the_callback(
    page: dict[str, Any], client: Client, random_model: Path, tmp_path: Path
) -> None:
    summary = libra.train(
        str(random_model),
        environment=page["Letters"](),
        score=page["score"],
        on_iteration=page["stop_when_solved"],
        client=client,
        run__dir=str(tmp_path),
        run__name="page",
        run__iterations=1,
        rollout__max_new_tokens=4,
        rollout__max_turns=2,
        trainer__prompts=2,
        trainer__group_size=2,
        observe__progress=False,
    )
    columns = zarr.open_group(summary.directory / "trajectories.zarr", mode="r")["trajectory"]
    assert set(columns["failure"][:]) <= {"none", "policy"}
    assert (columns["reward"][:] < 0).all() and np.isfinite(columns["reward"][:]).all()
    with pytest.raises(LibraError, match="solved"):
        page["stop_when_solved"]({"reward": 1.0})
