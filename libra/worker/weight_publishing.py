"""Publishing weights with their check: the trainer's answers, which an engine that holds the version reproduces.

The log-probabilities of the version before, and of version 0, come from the checks published then: nothing is computed
twice, and nothing of an older version is kept in the trainer. Everything is computed while the disk writes the tensors.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from libra.projections import project_tensors
from libra.weights import VersionCheck, WeightStore, WeightVersion

if TYPE_CHECKING:
    from libra.train import Replica

logger = logging.getLogger(__name__)

PROBES, PROBE_TOKENS, PROBE_SEED = 1, 32, 20260603


def probe_tokens(vocab_size: int, max_context_tokens: int) -> tuple[NDArray[np.int32], ...]:
    """The fixed token ids that are scored: the same for every version, trainer and engine of a run."""
    rng, length = np.random.default_rng(PROBE_SEED), min(PROBE_TOKENS, max_context_tokens)
    return tuple(rng.integers(0, vocab_size, length).astype(np.int32) for _ in range(PROBES))


def publish_checked(store: WeightStore, replica: Replica, version: int, max_context_tokens: int) -> WeightVersion:
    """Publish the replica's weights as ``version`` together with their check; an existing version keeps its own check.

    Raises
    ------
    WeightsError
        As `WeightStore.publish`.
    """

    tensors = replica.all_weights()
    # If the model is sharded, passes are collectives, which all ranks enter in one order; see `assist`.
    logp = probe_logp(replica, max_context_tokens) if replica.is_sharded else None

    def check(content: str) -> str:
        answers = probe_logp(replica, max_context_tokens) if logp is None else logp
        return make_check(store, replica, version, content, tensors, answers, max_context_tokens).to_json()

    published = store.publish(version, tensors, check=check, content=replica.content)
    if store.check_text(version) is None:  # published by an older Libra
        store.add_check(version, check(published.digest))
    return published


def assist(replica: Replica, max_context_tokens: int) -> None:
    """The part of the other ranks of a sharded replica while rank 0 publishes: the same collectives, in the same order."""
    replica.all_weights()
    probe_logp(replica, max_context_tokens)


def vocabulary(replica: Replica) -> int:
    """Size of the model's vocabulary."""
    return int(replica.model.config.get_text_config().vocab_size)


def probe_logp(replica: Replica, max_context_tokens: int) -> tuple[tuple[float, ...], ...]:
    """The replica's log-probabilities of the probe tokens, in nats."""
    rows = probe_tokens(vocabulary(replica), max_context_tokens)
    return tuple(tuple(float(nats) for nats in replica.score(row)) for row in rows)


def make_check(
    store: WeightStore,
    replica: Replica,
    version: int,
    content: str,
    tensors: Mapping[str, Tensor],
    logp: tuple[tuple[float, ...], ...],
    max_context_tokens: int,
) -> VersionCheck:
    """The check of ``version``, which the replica holds: its answers to the questions that engines get."""
    probe = tuple(tuple(row.tolist()) for row in probe_tokens(vocabulary(replica), max_context_tokens))
    text = store.check_text(version - 1) if version > 0 else None
    before = None if text is None else VersionCheck.from_json(text, f"version {version - 1} under {store.root}")
    known = before is not None and before.probe == probe
    return VersionCheck(
        version=version,
        digest=content,
        dtype=str(replica.dtype).removeprefix("torch."),
        seed=version,
        projections=project_tensors(tensors, version),
        probe=probe,
        logp=logp,
        previous_logp=before.logp if before is not None and known else None,
        first_logp=logp if version == 0 else before.first_logp if before is not None and known else None,
    )
