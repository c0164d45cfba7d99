"""The benchmark of old log-probabilities at a small size."""

from __future__ import annotations

import json

import pytest

from benchmarks.old_logp import main


def test_every_token_is_exact_to_a_millionth_of_a_nat(capsys: pytest.CaptureFixture[str]) -> None:
    size = {"dtype": "float64", "eta": 2, "steps": 1, "groups": 2, "group-size": 2, "generated-tokens": 12}
    main(["--json", *(text for name, value in size.items() for text in (f"--{name}", str(value)))])
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])["figures"]
    assert figures["coverage"]["value"] == 1.0
    assert figures["largest_gap"]["value"] < 1e-6
    assert 0 < figures["step_share"]["value"] < 1
