"""The planner's benchmark gives the figures it promises."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import planner


def test_figures_of_a_small_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / planner.TRACE
    trace.parent.mkdir()
    rng = np.random.default_rng(0)
    rows = ["task,sample,turn,prompt_tokens,completion_tokens"]
    for task in range(30):
        context = 1000
        for turn in range(int(rng.integers(2, 9))):
            tokens = int(rng.integers(50, 900))
            rows.append(f"t{task},0,{turn},{context},{tokens}")
            context += tokens + 300
    trace.write_text("\n".join(rows))
    planner.main(["--json", "--data", str(tmp_path), "--gpus", "16", "24", "--requests", "32", "--repeats", "1"])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["benchmark"] == "planner"
    figures = report["figures"]
    for size in ("16_32", "24_32"):
        assert {f"wall_s_{size}", f"gap_{size}", f"search_s_{size}", f"binning_{size}"} <= set(figures)
        assert 0 <= figures[f"gap_{size}"]["value"] < 0.05
    assert {f"regret_{side}_16_32" for side in ("train", "rollout", "tp")} <= set(figures)
