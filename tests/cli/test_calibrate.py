"""``libra calibrate``."""

import json
from pathlib import Path

import pytest

from libra.cli.main import main
from libra.hardware.shipped import read_tables

EXCERPT = Path(__file__).parents[2] / "benchmarks" / "data" / "hardware"
MLP = EXCERPT / "frontier" / "compute_a800_meta-llama_Llama-2-7b-hf_mlp.csv"


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        main(["calibrate", *arguments])
    out = capsys.readouterr()
    return int(ended.value.code or 0), out.out, out.err


@pytest.mark.live
def test_profiles_give_tables_and_an_error_by_operator(tmp_path, capsys):
    code, out, _ = run(capsys, str(MLP), "--save", str(tmp_path / "a800.json"), "--json")
    assert code == 0
    document = json.loads(out)
    errors = {error["operator"]: error for error in document["errors"]}
    assert document["gpu"] == "A800-80G"
    assert errors["mlp_up_proj"]["table_frac"] < 0.05 < 0.2
    assert read_tables(tmp_path / "a800.json").gpu.name == "A800-80G"
    code, out, _ = run(capsys, str(MLP))
    assert code == 0 and "mlp_down_proj" in out and "--save" in out
