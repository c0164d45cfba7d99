"""A random Qwen3 of a few thousand parameters, made once, and trajectories to train it on."""

import json

import numpy as np
import pytest
import torch

import factories
from libra.train import Replica, TrainSettings, pack

VOCABULARY = 48


@pytest.fixture(scope="session")
def golden(repository):
    """Cases of one .npz of tests/golden: (parameters, arrays by name); of equal parameters two, whatever their seeds."""

    def cases(name):
        archive, seen, result = np.load(repository / "tests" / "golden" / f"{name}.npz"), {}, []
        for index, parameters in enumerate(json.loads(str(archive["params_json"]))):
            kind = json.dumps({key: value for key, value in parameters.items() if key not in ("seed", "metrics")})
            seen[kind] = seen.get(kind, 0) + 1
            if seen[kind] <= 2:
                prefix = f"c{index}_"
                names = [key for key in archive.files if key.startswith(prefix)]
                result.append((parameters, {key.removeprefix(prefix): torch.as_tensor(archive[key]) for key in names}))
        return result

    return cases


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory):
    """Directory of the model: two layers, hidden size 32, tied embeddings."""
    directory = factories.save_model(tmp_path_factory.mktemp("model"), vocab_size=VOCABULARY, matrix_std=0.3)
    (directory / "tokenizer.json").write_text("{}", encoding="utf-8")
    return directory


@pytest.fixture
def trajectory():
    """Maker of one trajectory by its seed and advantage; the rest as `factories.trajectory`."""

    def make(seed, advantage=1.0, lengths=(5, 4, 3, 6), **changes):
        given = {"lengths": lengths, "vocabulary": VOCABULARY, "reward": advantage, "advantage": advantage}
        return factories.trajectory(seed=seed, **given | changes)

    return make


@pytest.fixture
def batch(trajectory):
    """Eight trajectories of 7 to 40 tokens with advantages of both signs."""
    rng = np.random.default_rng(1)
    made = []
    for index in range(8):
        lengths = tuple(int(n) for n in rng.integers(1, 11, 2 * int(rng.integers(1, 3))))
        made.append(trajectory(index, float(rng.normal()), (lengths[0] + 4, *lengths[1:])))
    return made


@pytest.fixture
def replica(model_dir):
    """Maker of replicas of the model; keyword arguments are those of TrainSettings, ``dtype`` and ``seed``."""

    def make(dtype=torch.float32, seed=0, **settings):
        return Replica(model_dir, TrainSettings(**{"lr": 1e-3, **settings}), dtype=dtype, seed=seed)

    return make


@pytest.fixture
def score():
    """Log-probabilities of the actions of each sample, each alone in a forward pass."""

    def logprobs(replica, samples):
        result = []
        for sample in samples:
            (one,) = pack([sample], max_row_tokens=1, micro_batch_tokens=10**6)
            with torch.no_grad():
                logits = replica.model(input_ids=one.token_ids_RW).logits[0]
            result.append(logits.log_softmax(-1)[one.action_at_N].gather(-1, one.target_N[:, None])[:, 0])
        return result

    return logprobs
