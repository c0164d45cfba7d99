"""Log-probabilities of a batch under older weights: of the versions that sampled its tokens, or their moving average.

``trainer.old_logp=version`` scores each stale token under the published weights of its own version, which the run keeps as long
as a step may need them. ``ewma`` scores every token under a `libra.train.moving_average.MovingAverage`. Both replace the model's
weights for the passes and restore them bit for bit. Passes are those of `libra.train.slice_gradient`: each sample is scored by
one replica of the group, and every replica has the result.

Invariants
----------
1. A token counts as exact only if its weights and KV cache are of one version and that version's weights were there.
2. Every sample with a gradient has a ``proximal_logp`` afterwards; NaN where the weights of the token's version were not.

Shape legend: A action tokens of a sample.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from libra.errors import TrainError
from libra.train.model_layout import local, part_of, release
from libra.train.moving_average import MovingAverage
from libra.train.replica_state import ReplicaState
from libra.train.samples import Sample
from libra.train.slice_gradient import SliceGradient

logger = logging.getLogger(__name__)

Published = Callable[[int], Mapping[str, Tensor] | None]
"""The weights of a version by name, whole; None if they are not there any more."""


@contextmanager
def lending(state: ReplicaState) -> Iterator[Callable[[Mapping[str, Tensor]], None]]:
    """A function that gives the model other weights, each in its local part, as often as it is called; afterwards the model has its
    own, bit for bit. Takes a second copy of them."""
    state.before_change(state.steps_done)
    own = {name: local(tensor).clone() for name, tensor in state.tensors().items()}
    try:
        yield partial(_put, state)
    finally:
        _put(state, own)


@torch.no_grad()
def _put(state: ReplicaState, weights: Mapping[str, Tensor]) -> None:
    for name, tensor in state.tensors().items():
        if name in weights:
            local(tensor).copy_(weights[name])
    release(state.model)


def under_average(
    state: ReplicaState, gradient: SliceGradient, average: MovingAverage, samples: Sequence[Sample]
) -> list[Sample]:
    """``samples`` with their log-probabilities under ``average``."""
    with lending(state) as put:
        put({name: local(tensor) for name, tensor in average.tensors.items()})
        return gradient.with_proximal(samples)


def under_versions(
    state: ReplicaState, gradient: SliceGradient, published: Published | None, samples: Sequence[Sample], step: int
) -> list[Sample]:
    """``samples`` for step ``step`` with the log-probability of each stale token under the weights that sampled it.

    That of a token of the weights being trained stays as it is, NaN if it was not computed: then it is the step's own. Where
    engines score alone what they generate (``rollout.exact_logprobs``), theirs is that of the version already, without a pass.
    TrainError if there are stale tokens and ``published`` is None.
    """
    useful = gradient.useful(samples)
    old: dict[int, NDArray[np.floating[Any]]] = {
        id(sample): np.full(sample.num_actions, np.nan)
        if sample.proximal_logp is None
        else np.where(sample.current, sample.proximal_logp, np.nan)
        for sample in useful
    }
    versions = sorted({int(version) for sample in useful for version in np.unique(sample.version)} - {step, -1})
    if state.settings.exact_logprobs:
        for sample in useful:
            stale = np.isin(sample.version, versions)
            old[id(sample)] = np.where(stale, sample.behaviour_logp, old[id(sample)])
        versions = []
    if versions and published is None:
        raise TrainError(
            f"trainer.old_logp: version, and step {step} has tokens of versions {versions}, whose weights this replica was not "
            "given; set Replica.published, or give trainer.old_logp=exact"
        )
    if versions:
        with lending(state) as put:
            for version in versions:
                assert published is not None
                weights = published(version)
                if not all(state.group.gather(weights is not None)):
                    logger.warning(
                        "step %d: the weights of version %d are gone; its tokens have the engine's log-probabilities",
                        step,
                        version,
                    )
                    continue
                assert weights is not None
                put({n: part_of(weights[n], tensor) for n, tensor in state.tensors().items() if n in weights})
                _score(gradient, useful, version, old)
    return [replace(sample, proximal_logp=old[id(sample)]) if id(sample) in old else sample for sample in samples]


def _score(
    gradient: SliceGradient, samples: Sequence[Sample], version: int, old: dict[int, NDArray[np.floating[Any]]]
) -> None:
    """Score the tokens of ``samples`` that are of ``version``, whose weights the model has, into ``old``."""
    chosen = [(sample, np.flatnonzero(sample.version == version)) for sample in samples]
    chosen = [(sample, at) for sample, at in chosen if len(at)]
    scored = gradient.scored([_only(sample, at) for sample, at in chosen])
    for (sample, at), logp in zip(chosen, scored, strict=True):
        old[id(sample)] = old[id(sample)].astype(logp.dtype)
        old[id(sample)][at] = logp


def _only(sample: Sample, at: NDArray[np.intp]) -> Sample:
    """The actions ``at`` of ``sample``, with the tokens up to the last of them."""
    return replace(
        sample,
        token_ids=sample.token_ids[: sample.action_at[at[-1]] + 1],
        action_at=sample.action_at[at],
        target=sample.target[at],
        behaviour_logp=sample.behaviour_logp[at],
        current=sample.current[at],
        version=sample.version[at],
        proximal_logp=None,
        kept=None,
        starts=tuple(start for start in sample.starts if start <= sample.action_at[at[-1]]),
    )
