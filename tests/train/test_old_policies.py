import numpy as np
import pytest
import torch

from libra.errors import TrainError
from libra.heads import score_alone
from libra.tensors import digest
from libra.train import sample_of


def steps(model, batch, score, count):
    """Take ``count`` steps on fresh tokens; copies of the weights of every version, the last included."""
    published = {}
    model.published = published.get
    for step in range(count):
        published[step] = {name: tensor.clone() for name, tensor in model.weights().items()}
        for one in batch:
            one.weight_version[one.is_action] = one.kv_version[one.is_action] = step
        near(model, batch, score, np.random.default_rng(step))
        model.step(batch, step)
    published[count] = {name: tensor.clone() for name, tensor in model.weights().items()}
    return published


def near(model, batch, score, rng):
    for one, logp in zip(batch, score(model, [sample_of(one, 0) for one in batch]), strict=True):
        one.behaviour_logprob[one.is_action] = logp.numpy() + 0.05 * rng.normal(size=len(logp))


def mix(batch, newest, rng):
    """Tokens of versions 0 to ``newest``, which grow along a trajectory, as in partial rollouts."""
    for one in batch:
        count = int(one.is_action.sum())
        one.weight_version[one.is_action] = one.kv_version[one.is_action] = np.sort(rng.integers(0, newest + 1, count))


def spied(model):
    seen = []
    accumulate = model.gradient.accumulate

    def spy(samples, step, tally):
        seen.extend(model.gradient.useful(samples))
        return accumulate(samples, step, tally)

    model.gradient.accumulate = spy
    return seen


def test_each_stale_token_is_scored_under_the_weights_that_sampled_it(replica, batch, score):
    model = replica(torch.float64, old_logp="version", correction="truncate", lr=3e-3)
    published = steps(model, batch, score, 4)
    mix(batch, 4, np.random.default_rng(0))
    one = next(one for one in batch if one.is_action.sum() > 2)
    last = np.flatnonzero(one.is_action)[-1]
    one.weight_version[last], one.kv_version[last] = 3, 2  # with KV of older weights: never exact
    before = digest(model.weights())
    expected = {}
    for version, weights in published.items():
        with model.lending() as put:
            put(weights)
            for sample, logp in zip(*scored(model, batch, score, 4), strict=True):
                expected[sample.token_ids.tobytes(), version] = logp.numpy()
    assert digest(model.weights()) == before  # bit for bit
    seen, largest, unknown = spied(model), 0.0, 0
    report = model.step(batch, 4)
    for sample in seen:
        for at, version in enumerate(sample.version):
            got = sample.proximal_logp[at]
            if version in (-1, 4):
                unknown += version == -1
                assert np.isnan(got)  # the engine's, or the step's own
            else:
                largest = max(largest, abs(got - expected[sample.token_ids.tobytes(), int(version)][at]))
    tokens = sum(sample.num_actions for sample in seen)
    assert largest < 1e-6 and unknown == 1
    assert report.exact_old_frac == pytest.approx(1 - 1 / tokens)
    assert report.old_logp_s > 0
    apart = (expected[s.token_ids.tobytes(), 0] - expected[s.token_ids.tobytes(), 4] for s in seen)
    assert max(abs(one).max() for one in apart) > 1e-3  # the versions differ


def test_tokens_whose_weights_are_gone_have_the_engines_and_are_not_exact(replica, batch, score):
    model = replica(torch.float64, old_logp="version", lr=3e-3)
    published = steps(model, batch, score, 2)
    mix(batch, 2, np.random.default_rng(0))
    del published[0]
    stale = sum(int((sample_of(one, 2).version == 0).sum()) for one in batch)
    tokens = sum(sample_of(one, 2).num_actions for one in batch)
    assert 0 < stale < tokens
    assert model.step(batch, 2).exact_old_frac == pytest.approx(1 - stale / tokens)
    model.published = None
    for one in batch:
        one.weight_version[one.is_action] = one.kv_version[one.is_action] = 1
    with pytest.raises(TrainError, match="old_logp"):
        model.step(batch, 3)


def test_what_engines_scored_alone_is_not_scored_again(replica, batch, monkeypatch):
    """With ``rollout.exact_logprobs`` a token's log-probability is that of its version, to which no pass adds anything."""
    model = replica(torch.float64, old_logp="version", correction="truncate", lr=3e-3, exact_logprobs=True)
    steps(model, batch, _alone, 3)
    mix(batch, 3, np.random.default_rng(0))
    seen = spied(model)
    monkeypatch.setattr(model.gradient, "scored", None)  # a pass would be an error
    assert model.step(batch, 3).exact_old_frac == 1.0
    for sample in seen:
        stale = sample.version != 3
        assert np.isnan(sample.proximal_logp[~stale]).all()
        assert sample.proximal_logp[stale].tolist() == sample.behaviour_logp[stale].tolist()


def _alone(model, own):
    """As engines with ``rollout.exact_logprobs`` score."""
    return [torch.from_numpy(score_alone(model.model, np.append(s.token_ids, s.target[-1]))[s.action_at]) for s in own]


def test_a_moving_average_is_the_old_policy_and_continues_from_a_checkpoint(replica, batch, score, tmp_path):
    settings = {"old_logp": "ewma", "ewma_decay": 0.5, "lr": 3e-3}
    model = replica(torch.float64, **settings)
    published = steps(model, batch, score, 3)
    names = model.average.tensors.keys()
    by_hand = {name: published[0][name].clone() for name in names}
    for version in (1, 2, 3):
        by_hand = {name: 0.5 * by_hand[name] + 0.5 * published[version][name] for name in names}
    for name in names:
        torch.testing.assert_close(model.average.tensors[name], by_hand[name])
    model.save(tmp_path / "step-000003")
    with model.lending() as put:
        put(by_hand)
        pairs = zip(*scored(model, batch, score, 3), strict=True)
        expected = {sample.token_ids.tobytes(): logp.numpy() for sample, logp in pairs}
    seen = spied(model)
    report = model.step(batch, 3)
    assert seen and report.exact_old_frac == 0
    for sample in seen:
        np.testing.assert_allclose(sample.proximal_logp, expected[sample.token_ids.tobytes()], atol=1e-9)
    other = replica(torch.float64, **settings)
    other.load(tmp_path / "step-000003")
    assert other.step(batch, 3).digest == report.digest
    fresh = replica(torch.float64, **settings)
    fresh.load(tmp_path / "step-000003")
    fresh.average.load({}, fresh.tensors())  # of a checkpoint without one: it begins at that checkpoint's weights
    assert fresh.step(batch, 3).digest != report.digest


def scored(model, batch, score, step):
    samples = [sample_of(one, step) for one in batch]
    return samples, score(model, samples)
