"""Lengths that are given: the truth, and guesses of stated accuracy."""

from __future__ import annotations

import numpy as np
import pytest

from libra.policy import KnownLengths, QuantumFinished, TrajectoryParked
from libra.types import Phase, ToolStatus


def test_the_oracle_gives_the_truth_and_a_predictor_guesses_of_its_accuracy() -> None:
    rng = np.random.default_rng(0)
    truth = {f"t-{i}": int(tokens) for i, tokens in enumerate(np.exp(rng.normal(8, 1, 4000)))}
    oracle, predictor = KnownLengths(truth), KnownLengths(truth, accuracy=0.7)
    guesses = []
    for key in truth:
        for forecaster in (oracle, predictor):
            forecaster.handle(TrajectoryParked(key, 0, Phase.ROLLOUT, 0))
        assert oracle.remaining(key).mean_tokens == truth[key]
        guesses.append(predictor.remaining(key).order_tokens)
    assert np.corrcoef(np.log(guesses), np.log(list(truth.values())))[0, 1] == pytest.approx(0.7, abs=0.03)
    oracle.handle(QuantumFinished("t-0", Phase.ROLLOUT, 5, "ls", ToolStatus.OK, 1.0))
    assert oracle.remaining("t-0").order_tokens == truth["t-0"] - 5
    with pytest.raises(ValueError, match="accuracy"):
        KnownLengths(truth, accuracy=0.0)
