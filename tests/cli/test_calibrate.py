"""``libra calibrate``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from libra.cli.main import main
from libra.hardware.shipped import read_tables

EXCERPT = Path(__file__).parents[2] / "benchmarks" / "data" / "hardware"
MLP = EXCERPT / "frontier" / "compute_a800_meta-llama_Llama-2-7b-hf_mlp.csv"


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["calibrate", *arguments])
    out = capsys.readouterr()
    return int(ended.value.code or 0), out.out, out.err


def test_profiles_give_tables_and_an_error_by_operator(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, str(MLP), "--save", str(tmp_path / "a800.json"), "--json")
    assert code == 0
    document = json.loads(out)
    errors = {error["operator"]: error for error in document["errors"]}
    assert document["gpu"] == "A800-80G"
    assert errors["mlp_up_proj"]["table_frac"] < 0.05 < 0.2
    assert read_tables(tmp_path / "a800.json").gpu.name == "A800-80G"
    code, out, _ = run(capsys, str(MLP))
    assert code == 0 and "mlp_down_proj" in out and "--save" in out


def test_nonsense_is_refused_with_what_it_probably_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, str(MLP), "--gpu", "A40-48G")
    assert code == 2 and "of A40-48G's peak operations" in err
    stray = tmp_path / "stray.csv"
    stray.write_text("a,b\n1,2\n")
    code, _, err = run(capsys, str(stray))
    assert code == 2 and "no known profile" in err
    unnamed = tmp_path / "mine.csv"
    unnamed.write_text(MLP.read_text())
    code, _, err = run(capsys, str(unnamed))
    assert code == 2 and "--gpu" in err


def test_a_directory_that_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "events.jsonl").write_text("")
    code, _, err = run(capsys, str(tmp_path))
    assert code == 2 and "holds no config.resolved.yaml" in err  # tests/sim/test_from_run.py calibrates from a run
