"""Settings of the posterior: its priors and how fast it forgets."""

from __future__ import annotations

from dataclasses import dataclass

from libra.policy.posterior.forecast_columns import SIGNALS


@dataclass(frozen=True, slots=True)
class PosteriorConfig:
    """Settings of the posterior.

    Attributes
    ----------
    signals : tuple of str
        Signals it may use, a subset of `SIGNALS`.
    forget : float
        Weight of a finished trajectory after each later one.
    version_forget : float
        Weight of everything learned after each new version of the weights.
    progress_shrink, signal_shrink, stack_shrink : float
        Weight, in trajectories, of the prior that a column of progress, a column of a signal, an expert has no effect.
    sibling_prior, family_prior : float
        Weight, in members, of the prior that a group, a family is like all others.
    guard_sigmas : (float, float)
        Standard errors by which a gain must stand out to be used in full: in the order, in the mean (whose errors have the
        heavier tail).
    censored : bool
        Learn from running trajectories.
    running_siblings : bool
        Count running siblings; else finished ones only.
    history : bool
        Start groups with the history of their prompt from earlier iterations.
    sample : int
        Running trajectories that a `learn` uses.
    """

    signals: tuple[str, ...] = SIGNALS
    forget: float = 0.998
    version_forget: float = 0.9
    progress_shrink: float = 1.0
    signal_shrink: float = 10.0
    stack_shrink: float = 3.0
    sibling_prior: float = 1.0
    family_prior: float = 5.0
    guard_sigmas: tuple[float, float] = (0.5, 1.0)
    censored: bool = True
    running_siblings: bool = True
    history: bool = True
    sample: int = 64
