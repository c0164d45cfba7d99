"""Skill of forecasts of the remaining length, on traces of real agents.

``python -m benchmarks.length_skill --data DIR --json`` reads every ``DIR/agent_turns/*.csv`` (default: the excerpt in
``benchmarks/data``).

Two protocols, both scored at every tool return with tokens left to generate:

five folds
    by task: learn from the trajectories of four folds, one after another, then forecast those of the fifth without learning
    from them. In a set with groups (several samples per task) also with siblings: ``_three`` (all others have finished),
    ``_together`` (all run at once), ``_probe`` (the first runs ahead); for the last two the training groups ran in the same way.
replayed
    in virtual time and prequentially: groups arrive in random order, all samples of one start together, 32 trajectories in
    flight. Mean over ``--orders`` orders; the second half of the returns is scored.

Figures, for every predictor and set: ``<predictor>_{r2,logr2,spearman}_<set>`` from five folds (with three finished siblings
where the set has groups, and ``..._alone`` without any, ``..._together``, ``..._probe``), ``..._replayed`` from the replay, and
``<predictor>_tail25_<set>``, ``tail50``: share of the longest tenth in the forecast's top tenth when all running trajectories have
generated a quarter (half) of the tail's threshold. ``weight_<part>_<set>`` is the posterior's weight of each part at the end of
a replay, ``skill_<set>`` its skill. R2 is of the mean forecast on tokens, log-R2 and Spearman of the order.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Sequence

import numpy as np

from benchmarks.agent_traces import Trace, read_traces, sets_in
from benchmarks.forecasters import FORECASTERS
from benchmarks.length_replay import ScoredForecast, replay, scores, tail_recall, train_on
from benchmarks.report import Figure, command_parser, emit
from libra.errors import ConfigError
from libra.policy.forecast import Forecaster
from libra.policy.posterior import Posterior

FOLDS = 5
MIN_ORDERS = 5
MODES = ("alone", "three", "together", "probe")

MakeForecaster = Callable[[], Forecaster]

GOALS: dict[str, float] = {
    "posterior_spearman_mini_swe": 0.58,
    "posterior_r2_mini_swe": 0.15,
    "posterior_spearman_agentcgroup": 0.40,
    "posterior_r2_tau": 0.33,
    "posterior_r2_tau_together": 0.157,
}


def groups_of(traces: Sequence[Trace]) -> list[list[Trace]]:
    """Samples of one prompt together, in the order of the file."""
    groups: dict[str, list[Trace]] = {}
    for trace in traces:
        groups.setdefault(trace.group, []).append(trace)
    return list(groups.values())


def folds_of(traces: Sequence[Trace]) -> list[list[list[Trace]]]:
    """Groups in ``FOLDS`` folds; what shares a task shares a fold, also where its environment differs."""
    tasks = sorted({trace.task for trace in traces})
    fold = {tasks[at]: rank % FOLDS for rank, at in enumerate(np.random.default_rng(0).permutation(len(tasks)))}
    folds: list[list[list[Trace]]] = [[] for _ in range(FOLDS)]
    for group in groups_of(traces):
        folds[fold[group[0].task]].append(group)
    return folds


def five_folds(make: MakeForecaster, traces: Sequence[Trace], modes: Sequence[str]) -> dict[str, list[ScoredForecast]]:
    """Forecasts of all trajectories of each fold after training on the other four, by mode."""
    folds = folds_of(traces)
    scored: dict[str, list[ScoredForecast]] = {mode: [] for mode in modes}
    for held_out in range(FOLDS):
        train = [trace for at, fold in enumerate(folds) if at != held_out for group in fold for trace in group]
        one_by_one = make()
        train_on(one_by_one, [train[i] for i in np.random.default_rng(held_out).permutation(len(train))])
        for mode in modes:
            forecaster = one_by_one
            if mode in ("together", "probe"):
                forecaster = make()
                learned_from = [group for at, fold in enumerate(folds) if at != held_out for group in fold]
                for at in np.random.default_rng(held_out).permutation(len(learned_from)):
                    replay(forecaster, arrivals_of(learned_from[at], mode), 1)
            for group in folds[held_out]:
                scored[mode] += ask(forecaster, group, mode)
    return scored


def arrivals_of(group: Sequence[Trace], mode: str) -> list[Sequence[Trace]]:
    """The group's samples in order of their start: all at once, or the first before the others."""
    return [group] if mode == "together" or len(group) < 2 else [group[:1], group[1:]]


def ask(learned: Forecaster, group: Sequence[Trace], mode: str) -> list[ScoredForecast]:
    """Forecasts of a copy of ``learned`` for a new group; it learns from siblings only."""
    if mode == "alone":
        return [
            item for trace in group for item in replay(learned, [[trace]], 1, learn=False, completed=False)
        ]  # forgotten at once: no copy needed
    if mode == "three":
        scored: list[ScoredForecast] = []
        for trace in group:
            forecaster = copy.deepcopy(learned)
            train_on(forecaster, [sibling for sibling in group if sibling is not trace])
            scored += replay(forecaster, [[trace]], 1, learn=False)
        return scored
    return replay(copy.deepcopy(learned), arrivals_of(group, mode), 1, learn=False)


def replays(
    make: MakeForecaster, traces: Sequence[Trace], orders: int, in_flight: int
) -> tuple[dict[str, float], Forecaster]:
    """Mean scores over random orders of arrival, on the second half of the returns; and the last order's forecaster."""
    groups = groups_of(traces)
    found: list[dict[str, float]] = []
    forecaster = make()
    for order in range(orders):
        forecaster = make()
        arrivals = [groups[i] for i in np.random.default_rng(1000 + order).permutation(len(groups))]
        scored = replay(forecaster, arrivals, in_flight)
        half = scored[len(scored) // 2 :]
        found.append(
            {
                **scores(half),
                "tail25": tail_recall(scored, traces, 0.25),
                "tail50": tail_recall(scored, traces, 0.5),
            }
        )
    return {name: float(np.mean([one[name] for one in found])) for name in found[0]}, forecaster


def measure(name: str, traces: Sequence[Trace], options: argparse.Namespace) -> dict[str, Figure]:
    """All figures of one set."""
    grouped = len(traces) >= 2 * len(groups_of(traces))
    modes = MODES if grouped else MODES[:1]
    figures: dict[str, Figure] = {}

    def add(figure: str, value: float) -> None:
        unit = "share" if "tail" in figure or "weight" in figure else "ratio"
        figures[figure] = Figure(value, unit, "higher", GOALS.get(figure))

    for predictor in options.predictors:
        make = FORECASTERS[predictor]
        for mode, scored in five_folds(make, traces, modes).items():
            suffix = "" if mode == ("three" if grouped else "alone") else f"_{mode}"
            for score, value in scores(scored).items():
                add(f"{predictor}_{score}_{name}{suffix}", value)
            if not suffix:
                for share in (25, 50):
                    add(f"{predictor}_tail{share}_{name}", tail_recall(scored, traces, share / 100))
        mean, forecaster = replays(make, traces, options.orders, options.in_flight)
        for score, value in mean.items():
            add(f"{predictor}_{score}_{name}_replayed", value)
        if predictor == "posterior" and isinstance(forecaster, Posterior):
            add(f"skill_{name}", forecaster.skill)
            for part, weight in forecaster.weights.items():
                add(f"weight_{part}_{name}", weight)
        _show(name, predictor, figures)
    return figures


def _show(name: str, predictor: str, figures: dict[str, Figure]) -> None:
    """Print one line per predictor."""
    found = [
        f"{figure.removeprefix(predictor + '_').replace('_' + name, '')} {figures[figure].value:.3f}"
        for figure in figures
        if figure.startswith(f"{predictor}_")
        and figure.split("_")[predictor.count("_") + 1] in ("r2", "logr2", "spearman")
    ]
    print(f"{name} {predictor}: {', '.join(found)}", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = command_parser("length_skill", __doc__, data=True)
    parser.add_argument("--sets", nargs="+", help="names of sets; default: all that are there")
    parser.add_argument("--predictors", nargs="+", choices=list(FORECASTERS), default=list(FORECASTERS))
    parser.add_argument("--orders", type=int, default=MIN_ORDERS, help="random orders of arrival")
    parser.add_argument("--in-flight", type=int, default=32, help="trajectories at once")
    options = parser.parse_args(arguments)
    if options.orders < MIN_ORDERS:
        raise ConfigError(
            f"--orders: got {options.orders}; a mean rests on at least {MIN_ORDERS}, type --orders {MIN_ORDERS}"
        )
    sets = sets_in(options.data)
    if unknown := set(options.sets or ()) - set(sets):
        raise ConfigError(f"--sets: no {', '.join(sorted(unknown))} in {options.data}; there are {', '.join(sets)}")
    figures: dict[str, Figure] = {}
    for name in options.sets or sets:
        traces = read_traces(sets[name])
        print(f"{name}: {len(traces)} trajectories in {len(groups_of(traces))} groups")
        figures |= measure(name, traces, options)
    emit("length_skill", figures, arguments=arguments, as_json=options.json)


if __name__ == "__main__":
    main()
