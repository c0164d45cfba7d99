import numpy as np
import pytest

from libra.weights.version_check import Answers, ExpectedProbes, VersionCheck, calibrate, judge

LOGP = tuple(np.linspace(-12.0, -0.1, 64).tolist())


def check(dtype, version=1):
    return VersionCheck(version, "", dtype, 0, {}, (tuple(range(65)),), (LOGP,))


def answers(*differences, noise=0.0):
    """An engine that is off by ``noise`` everywhere, with alternating sign, and by more at some tokens."""
    logp = np.array(LOGP) + noise * np.where(np.arange(64) % 2, 1.0, -1.0)
    for place, difference in differences:
        logp[place] += difference
    return Answers((logp.astype(np.float32),), {})


def verdict(dtype, answer, noise):
    calibration = calibrate(check(dtype, 0), answers(noise=noise))
    assert calibration.measured
    return judge(check(dtype), ExpectedProbes(), answer, calibration)


def test_one_unlikely_token_that_rounds_otherwise_is_no_stale_layer_in_bfloat16():
    found = verdict("bfloat16", answers((0, 1.6), (1, -0.9), noise=0.08), noise=0.08)
    assert found.passed
    assert calibrate(check("bfloat16", 0), answers(noise=0.08)).probe_nats == pytest.approx(0.32, rel=0.01)


@pytest.mark.parametrize("shift", [0.4, -0.4])
def test_tokens_that_are_off_all_together_are_one(shift):
    found = verdict("bfloat16", answers(*[(place, shift) for place in range(64)], noise=0.08), noise=0.08)
    assert not found.passed and (found.method, found.layer) == ("probe", "(all)")
    assert not verdict("bfloat16", answers((0, np.nan), noise=0.08), noise=0.08).passed


def test_in_float32_every_token_counts():
    assert verdict("float32", answers(noise=1e-5), noise=1e-5).passed
    assert verdict("float32", answers((0, 1.24e-5)), noise=2.85e-6).passed  # as seen at a token of -14 nats
    assert not verdict("float32", answers((0, 1.24e-4)), noise=2.85e-6).passed
    found = verdict("float32", answers((5, 1e-3), noise=1e-5), noise=1e-5)
    assert not found.passed and found.gap == pytest.approx(1e-3, rel=0.05)


def test_a_version_at_which_tokens_are_less_likely_rounds_more():
    allowed = calibrate(check("float32", 0), answers(noise=2.85e-6))
    sharp = np.array(LOGP) * 10.0
    later = VersionCheck(9, "", "float32", 0, {}, (tuple(range(65)),), (tuple(sharp.tolist()),))
    for off, passes in ((1.2e-4, True), (1.2e-3, False)):  # 8 and 80 rounding units of -120 nats
        given = Answers(((sharp + off * (np.arange(64) == 0)).astype(np.float32),), {})
        assert judge(later, ExpectedProbes(), given, allowed).passed == passes


def test_an_engine_that_computes_another_model_is_not_a_noisy_one():
    calibration = calibrate(check("bfloat16", 0), answers(noise=2.0))
    assert not judge(check("bfloat16"), ExpectedProbes(), answers(noise=2.0), calibration).passed
