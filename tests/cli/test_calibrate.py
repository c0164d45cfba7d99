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


def test_a_run_gives_its_workers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = [
        {
            "name": "quantum_finished",
            "phase": "ROLLOUT",
            "worker": "rollout-0",
            "t_s": 2.0 * i + 0.1 + 0.01 * (5 + i % 7),
            "latency_s": 0.1 + 0.01 * (5 + i % 7),
            "tokens": 5 + i % 7,
        }
        for i in range(64)
    ]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    steps = [
        {"step": k, "wall_time_s": k, "train_s": 0.5 + 1e-4 * (k + 1) * 500, "forwarded_tokens": (k + 1) * 500}
        for k in range(8)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    code, out, _ = run(capsys, str(tmp_path), "--json", "--save", str(tmp_path / "steps.json"))
    assert code == 0
    document = json.loads(out)
    assert document["engines"]["rollout-0"]["token_s"] == pytest.approx(0.01, rel=0.1)
    assert document["trainer"]["token_s"] == pytest.approx(1e-4, rel=0.1)
    assert json.loads((tmp_path / "steps.json").read_text()) == document
    code, out, _ = run(capsys, str(tmp_path))
    assert code == 0 and "rollout-0" in out and "trainer: 8 steps" in out
