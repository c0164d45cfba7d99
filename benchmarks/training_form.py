"""Seconds of one training pass over a micro-batch of one model, fitted to a profile and corrected at the measured sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from libra.hardware.run_calibration import fit_positive

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TrainingForm:
    """Seconds of one pass over a micro-batch of one model, fitted to a profile: ``fixed + size x (work / tp + link[tp])``.

    Links are constants per tensor-parallel degree, not one bandwidth: two GPUs may share a bridge that four do not.

    Attributes
    ----------
    fixed_s, work_s : float
        Of a micro-batch; of one sequence on one GPU.
    link_s : mapping of tp to float
        Communication of one sequence; none at tp 1.
    sizes, log_ratio : mapping of tp to arrays
        What the form leaves: measured over predicted at the measured sizes, read between them in logarithms.
    """

    fixed_s: float
    work_s: float
    link_s: Mapping[int, float]
    log_sizes: Mapping[int, Array]
    log_ratio: Mapping[int, Array]

    @property
    def num_constants(self) -> int:
        """Fitted constants."""
        return 2 + len(self.link_s)

    def form_s(self, size: Array, tp: int) -> Array:
        """The form alone."""
        link = self.link_s.get(tp, 0.0)
        return np.asarray(self.fixed_s + np.asarray(size, float) * (self.work_s / tp + link))

    def seconds(self, size: Array, tp: int) -> Array:
        """The form times the ratio measured at sizes near by."""
        seconds = self.form_s(size, tp)
        if tp in self.log_sizes:
            seconds = seconds * np.exp(np.interp(np.log(size), self.log_sizes[tp], self.log_ratio[tp]))
        return np.asarray(seconds)


def fit_training(points: Array, seconds: Array) -> TrainingForm:
    """The form of measured seconds.

    Parameters
    ----------
    points : (n, 2) array
        Sequences of a micro-batch, tensor-parallel degree.
    seconds : (n,) array
        Of one pass through all layers.
    """
    sizes, tps = points[:, 0], points[:, 1].astype(int)
    degrees = sorted({int(tp) for tp in tps if tp > 1})
    start = np.array(
        [0.1 * seconds.min(), float(np.median(seconds / sizes * tps)) / 2, *[seconds.min() / 4] * len(degrees)]
    )

    def form(values: Array) -> TrainingForm:
        return TrainingForm(values[0], values[1], dict(zip(degrees, values[2:].tolist(), strict=True)), {}, {})

    def residuals(values: Array) -> Array:
        trial = form(values)
        return np.log(np.array([trial.form_s(b, tp) for b, tp in zip(sizes, tps, strict=True)]) / seconds)

    fitted = form(
        fit_positive(residuals, start, tether=0.003)
    )  # a constant that the points do not determine stays where it began
    log_sizes, log_ratio = {}, {}
    for tp in sorted(set(tps.tolist())):
        here = np.flatnonzero(tps == tp)[np.argsort(sizes[tps == tp])]
        log_sizes[tp] = np.log(sizes[here])
        log_ratio[tp] = np.log(seconds[here] / fitted.form_s(sizes[here], tp))
    return replace(fitted, log_sizes=log_sizes, log_ratio=log_ratio)
