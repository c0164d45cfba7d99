"""Publishing with a check: beside the weights goes what an engine must answer to show that it holds them.

The log-probabilities of the version before, and of version 0, come from the checks published then: nothing is computed
twice, and nothing of an older version is kept in the trainer. Everything is computed while the disk writes the tensors.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from libra.projections import project_tensors
from libra.weights import VersionCheck, WeightStore, WeightVersion

if TYPE_CHECKING:
    from libra.train import Replica

logger = logging.getLogger(__name__)

PROBES, PROBE_TOKENS, PROBE_SEED = 2, 64, 20260603


def probe_tokens(vocab_size: int, max_context_tokens: int) -> tuple[NDArray[np.int32], ...]:
    """The fixed token ids that are scored: the same for every version, trainer and engine of a run."""
    rng, length = np.random.default_rng(PROBE_SEED), min(PROBE_TOKENS, max_context_tokens)
    return tuple(rng.integers(0, vocab_size, length).astype(np.int32) for _ in range(PROBES))


def publish_checked(store: WeightStore, replica: Replica, version: int, max_context_tokens: int) -> WeightVersion:
    """Publish the replica's weights as ``version`` together with their check; one that is there keeps its own.

    Raises
    ------
    WeightsError
        As `WeightStore.publish`.
    """

    def check(content: str) -> str:
        return make_check(store, replica, version, content, max_context_tokens).to_json()

    done = replica.last_report
    content = done.digest if done is not None and done.step == version - 1 == replica.steps_done - 1 else None
    published = store.publish(version, replica.all_weights(), check=check, content=content)
    if store.check_text(version) is None:  # of an older Libra
        store.add_check(version, check(published.digest))
    return published


def make_check(
    store: WeightStore, replica: Replica, version: int, content: str, max_context_tokens: int
) -> VersionCheck:
    """What the replica, which holds ``version``, answers to the questions that engines are asked."""
    tokens = probe_tokens(int(replica.model.config.get_text_config().vocab_size), max_context_tokens)
    probe = tuple(tuple(row.tolist()) for row in tokens)
    logp = tuple(tuple(float(nats) for nats in replica.score(row)) for row in tokens)
    text = store.check_text(version - 1) if version > 0 else None
    before = None if text is None else VersionCheck.from_json(text, f"version {version - 1} under {store.root}")
    known = before is not None and before.probe == probe
    return VersionCheck(
        version=version,
        digest=content,
        dtype=str(replica.dtype).removeprefix("torch."),
        seed=version,
        projections=project_tensors(replica.all_weights(), version),
        probe=probe,
        logp=logp,
        previous_logp=before.logp if before is not None and known else None,
        first_logp=logp if version == 0 else before.first_logp if before is not None and known else None,
    )
