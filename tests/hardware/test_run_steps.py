"""Engines and trainers from a run's own logs."""

import numpy as np
import pytest

from libra.errors import ConfigError
from libra.hardware.run_step_fit import fit_engines, fit_trainer


def generations(num, worker, *, fixed, token, beside):
    """Events of waves of four generations that start together, whose latencies are exactly the model's."""
    rng = np.random.default_rng(7)
    events, clock = [], 0.0
    for _ in range(num // 4):
        at_once = int(rng.integers(1, 5))
        tokens = int(rng.integers(5, 80))
        latency = fixed + tokens * (token + beside * (at_once - 1))
        event = {"name": "quantum_finished", "phase": "ROLLOUT", "worker": worker, "t_s": clock + latency}
        events += [event | {"latency_s": latency, "tokens": tokens} for _ in range(at_once)]
        clock += latency + 0.01
    return events


def test_two_workers_of_different_speed_are_told_apart():
    events = generations(400, "rollout-0", fixed=0.02, token=0.004, beside=0.0005)
    events += generations(400, "rollout-1", fixed=0.02, token=0.008, beside=0.001)
    events.append(events[0] | {"phase": "TOOL", "worker": "tool-0"})
    engines = fit_engines(events)
    assert sorted(engines) == ["rollout-0", "rollout-1"]
    fast, slow = engines["rollout-0"], engines["rollout-1"]
    assert fast.token_s == pytest.approx(0.004, rel=0.05)
    assert slow.token_s + 2 * slow.sequence_s == pytest.approx(2 * (fast.token_s + 2 * fast.sequence_s), rel=0.05)
    assert max(fast.error_frac, slow.error_frac) < 0.02


def test_the_error_is_of_what_was_not_fitted_and_too_little_is_refused():
    for few in ([], generations(16, "w", fixed=0.1, token=0.1, beside=0.0)[:16]):
        with pytest.raises(ConfigError, match="generations"):
            fit_engines(few)
    events = generations(800, "w", fixed=0.02, token=0.004, beside=0.0)
    middle = max(event["t_s"] for event in events) / 2
    for event in events:
        if event["t_s"] > middle:
            event["latency_s"] *= 3.0  # the machine became slower half way
    assert fit_engines(events)["w"].error_frac > 0.1


def test_a_trainer_from_its_steps():
    tokens = np.linspace(1000, 4000, 12)
    trainer = fit_trainer(0.2 + 1e-3 * tokens, tokens)
    assert trainer is not None
    assert trainer.step_s(10_000) == pytest.approx(10.2, rel=0.03)
    assert fit_trainer([1.0], [1.0]) is None
    with pytest.raises(ConfigError):
        fit_trainer([1.0, 0.0, 1.0, 1.0], [1.0] * 4)
