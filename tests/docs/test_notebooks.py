"""The notebooks of docs/ run in a Jupyter kernel, with tiny settings in place of their parameters."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.live
SETTINGS = {"quick_start": "iterations, questions = 1, 8", "own_environment": "iterations, prompts = 1, 2"}
"""Replace the cell with the tag ``parameters``."""


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_a_notebook_runs_and_prints_plain_lines(name, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(ROOT / f"docs/notebooks/{name}.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "stored outputs have paths and grow: clear them"
    (given,) = (cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ()))
    given.source = SETTINGS[name]
    settings = {"cluster__dashboard_port": 0, "evaluation__prompts": 8}
    for cell in notebook.cells:
        if "libra.train(" in cell.source:
            train = cell
            missing = [f"    {key}={value}," for key, value in settings.items() if key not in cell.source]
            cell.source = cell.source.replace("libra.train(\n", "libra.train(\n" + "\n".join([*missing, ""]))
    place = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=180, kernel_name="python3", resources=place).execute()
    kinds = {(output.output_type, output.get("name")) for output in train.outputs}
    assert kinds == {("stream", "stdout")}, train.outputs  # no display for each line, and nothing on standard error
    said = "".join(output.text for output in train.outputs)
    assert "watch them at http://" in said and "iteration 0 (1 of 1): reward " in said
    assert [*tmp_path.glob("runs/*/checkpoints/step-000001")]
    shown = notebook.cells[notebook.cells.index(train) + (1 if name == "quick_start" else 0)].outputs
    assert any("held-out reward" in str(output) for output in shown)


def test_every_notebook_is_run():
    assert {path.stem for path in (ROOT / "docs/notebooks").glob("*.ipynb")} == set(SETTINGS)
