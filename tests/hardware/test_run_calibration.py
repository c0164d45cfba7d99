"""The trainer from a run's own steps."""

import numpy as np
import pytest

from libra.hardware.run_calibration import fit_positive, fit_trainer


def test_a_trainer_from_its_steps():
    tokens = np.linspace(1000, 4000, 12)
    trainer = fit_trainer(0.2 + 1e-3 * tokens, tokens)
    assert trainer is not None
    assert trainer.step_s(10_000) == pytest.approx(10.2, rel=0.03)
    assert fit_trainer([1.0], [1.0]) is None


def test_a_fit_finds_constants_despite_outliers():
    x = np.linspace(1.0, 10.0, 50)
    measured = 3.0 + 0.5 * x
    measured[::10] *= 4.0
    found = fit_positive(lambda c: np.log((c[0] + c[1] * x) / measured), np.array([1.0, 1.0]))
    assert found == pytest.approx([3.0, 0.5], rel=0.03)
