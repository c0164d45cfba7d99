import sys

import numpy as np
import pytest
import torch

from libra.errors import MismatchAlarm
from libra.heads import score_alone
from libra.tensors import digest
from libra.train import Replica, Sample, TrainSettings
from libra.train.mismatch import alarm_text, observe
from libra.train.step_report import LARGE_MODEL_BYTES, StepMemory, Tally, resident_bytes

LENGTHS = (5, 4, 3, 6)
LARGE = 64_000_000
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="resident memory is read from Linux's /proc")


def recorded(replica, made, version=0):
    """The trajectory with the log-probabilities that an exact engine records: each turn scored alone, at its own length."""
    ends = np.cumsum(LENGTHS)
    for begin, end in zip(ends[:-1:2], ends[1::2], strict=True):
        made.behaviour_logprob[begin:end] = score_alone(replica.model, made.token_ids[:end], int(begin))
    made.turns = [{"prompt_tokens": int(begin)} for begin in ends[:-1:2]]
    return made


@pytest.fixture
def make_replica(model_dir):
    return lambda **changes: Replica(model_dir, TrainSettings(lr=1e-3, **changes), threads=1)


def test_the_figures_are_those_of_the_definition():
    engine = np.array([-1.5, -2.0, -0.25], np.float32)
    sample = Sample(np.arange(4), np.arange(3), np.arange(3), engine, np.ones(3, np.bool_), 1.0)
    tally = Tally()
    observe(tally, sample, np.arange(2), np.array([0.5, 0.0]))
    observe(tally, sample, np.array([2]), np.array([-0.25]))
    report = tally.report(step=0, digest="", lr=0.0, total_s=1.0)
    ratio = np.exp([0.5, 0.0, -0.25])
    assert report.mismatch_tokens == 3
    assert report.mismatch_max_abs == pytest.approx(0.5)
    assert report.mismatch_mean_abs == pytest.approx(0.25)
    assert report.mismatch_k3 == pytest.approx(np.mean(ratio - 1 - np.log(ratio)), rel=1e-6)
    assert report.mismatch_effective_frac == pytest.approx(ratio.sum() ** 2 / (3 * (ratio**2).sum()), rel=1e-6)


def test_stale_tokens_and_kept_kv_are_no_mismatch(make_replica, trajectory):
    replica = make_replica()
    made = recorded(replica, trajectory(1))
    stale = recorded(replica, trajectory(2))
    stale.behaviour_logprob -= 5.0
    stale.kv_version[stale.is_action] = -1  # tokens of version 0, attending to KV of older weights
    report = replica.step([made, stale], 0)
    assert report.mismatch_tokens == made.num_action_tokens
    assert report.mismatch_max_abs < 1e-4
    assert make_replica().step([stale], 0).mismatch_k3 is None  # not measured


def test_stale_tokens_are_compared_under_their_own_version_where_its_weights_are_known(make_replica, trajectory):
    replica = make_replica(old_logp="version")
    first = {name: tensor.clone() for name, tensor in replica.weights().items()}
    batch = [recorded(replica, trajectory(seed)) for seed in range(2)]
    replica.published = lambda version: first
    replica.step(batch, 0)
    report = replica.step(batch, 1)
    assert report.mismatch_tokens == sum(made.num_action_tokens for made in batch) and report.mismatch_max_abs < 1e-4
    replica.published = lambda version: {name: 1.2 * tensor for name, tensor in first.items()}
    assert replica.step(batch, 2).mismatch_mean_abs > 1e-3


def test_exact_logprobs_give_a_gap_of_exactly_zero_and_one_weight_gives_one_above_it(make_replica, trajectory):
    replica = make_replica(exact_logprobs=True)
    batch = [recorded(replica, trajectory(seed)) for seed in range(4)]
    report = replica.step(batch, 0)
    assert report.mismatch_tokens == sum(made.num_action_tokens for made in batch)
    assert report.mismatch_max_abs == 0.0 == report.mismatch_k3
    assert report.mismatch_effective_frac == pytest.approx(1)

    perturbed = make_replica(exact_logprobs=True)
    with torch.no_grad():
        perturbed.model.get_parameter("model.layers.0.self_attn.v_proj.weight")[0, 0] += 1e-3
    assert perturbed.step(batch, 0).mismatch_max_abs > 0


def test_stop_refuses_the_step_by_default_and_warn_takes_it(make_replica, trajectory):
    replica, warned = make_replica(rounding_nats=1e-3), make_replica(rounding_nats=1e-3, mismatch_action="warn")
    before = {name: tensor.clone() for name, tensor in replica.weights().items()}
    with pytest.raises(MismatchAlarm, match="step 0"):
        replica.step([trajectory(1), trajectory(2)], 0)
    assert replica.steps_done == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in replica.weights().items())
    warned.step([trajectory(1), trajectory(2)], 0)
    assert warned.steps_done == 1


def test_no_alarm_at_the_threshold_or_without_one():
    numbers = {"mismatch_mean_abs": 0.05, "mismatch_max_abs": 1.0, "mismatch_k3": 0.002, "mismatch_tokens": 10}
    assert alarm_text(numbers, 0, mean_nats=0.05, k3_nats=0.002) is None
    assert alarm_text(numbers, 0) is alarm_text(numbers, 0, rounding_nats=0.01) is None  # in bfloat16 of so few tokens
    assert "mismatch_args.mean" in alarm_text(numbers | {"mismatch_tokens": 64}, 0, rounding_nats=0.01)
    assert "mismatch_args.mean" in alarm_text(numbers, 0, rounding_nats=1e-3)
    assert "step 0" in alarm_text(numbers, 0, mean_nats=0.04, k3_nats=0.001)
    assert "k3" in alarm_text(numbers, 0, mean_nats=0.05, k3_nats=0.001)


def test_the_digest_that_is_kept_is_never_that_of_other_weights(make_replica, trajectory):
    replica = make_replica()
    assert replica.content is None
    other = {name: tensor.clone() for name, tensor in replica.weights().items()}
    report = replica.step([trajectory(1), trajectory(2, advantage=-1.0)], 0)
    assert replica.content == report.digest == digest(replica.weights())
    replica.take_weights(other)
    assert replica.content is None


def test_parts_are_sums_over_engines_and_length_classes(make_replica, trajectory):
    replica = make_replica()
    made = [recorded(replica, trajectory(seed)) for seed in range(3)]
    for each in made:
        each.turns[0]["worker"], each.turns[1]["worker"] = "good", "bad"
        each.behaviour_logprob[12:18] -= 0.5  # the second turn
    report = replica.step(made, 0)
    parts = report.mismatch_parts
    assert {name: part["tokens"] for name, part in parts.items()} == {
        "engine good": 3 * LENGTHS[1], "engine bad": 3 * LENGTHS[3], "length class 8": 3 * (LENGTHS[1] + LENGTHS[3])
    }  # fmt: skip
    assert parts["engine good"]["k3"] < 1e-9
    assert parts["engine bad"]["k3"] == pytest.approx(np.expm1(0.5) - 0.5, rel=1e-3)
    assert parts["engine bad"]["mean_abs"] == pytest.approx(0.5, rel=1e-3) == parts["engine bad"]["max_abs"]
    assert parts["length class 8"]["k3"] == pytest.approx(report.mismatch_k3)
    first = report.mismatch_worst[0]
    assert (first["engine"], first["trainer"] - first["rollout"]) == ("bad", pytest.approx(0.5, rel=1e-3))
    assert made[0].token_ids[first["token"]] == first["token_id"] or first["trajectory"] != str(made[0].trajectory_id)


def test_one_engine_of_many_raises_the_alarm_that_the_mean_does_not():
    parts = {
        "engine a": {"tokens": 900, "k3": 1e-12, "mean_abs": 1e-6},
        "engine b": {"tokens": 100, "k3": 5e-3, "mean_abs": 0.1},
    }
    numbers = {"mismatch_mean_abs": 0.01, "mismatch_max_abs": 1.0, "mismatch_k3": 5e-4, "mismatch_tokens": 1000}
    numbers["mismatch_parts"] = parts
    assert "engine b" in alarm_text(numbers, 0, k3_nats=1e-3)
    assert "engine b" in alarm_text(numbers, 0, mean_nats=0.05)
    assert alarm_text(numbers, 0, mean_nats=0.2, k3_nats=6e-3) is None
    parts["engine b"]["tokens"] = 10  # too few to say
    assert alarm_text(numbers, 0, k3_nats=1e-3) is None


@linux
def test_the_most_of_a_step_counts_and_not_that_of_the_step_before():
    before = torch.ones(LARGE // 4)  # what was there before the model does not count
    memory = StepMemory()
    memory.model_loaded(LARGE_MODEL_BYTES)
    assert memory.peak_bytes() == 0  # no step has begun
    memory.start()
    torch.ones(LARGE // 4)
    assert LARGE * 0.7 < memory.peak_bytes() < 3 * LARGE  # what others gave back meanwhile does not count
    memory.start()
    assert memory.before_bytes > LARGE and resident_bytes() >= before.nbytes
    assert memory.peak_bytes() < LARGE * 0.5  # it was given back, and the mark was set back
