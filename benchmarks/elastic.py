"""Cost of role changes, and gain of replanning under drift.

``python -m benchmarks.elastic [--data DIR] --json``. Figures, in parts that ``--part`` chooses:

drift (virtual time, emulated engine speeds; see `benchmarks.elastic_drift`)
    ``over_static``: tokens per second with replanning over the best static split in hindsight, at staleness bound 0, where GPUs
    may roll out and train in one step. ``over_static_split_only``: the same where each GPU is in one pool.
    ``over_static_eta1``: the same at bound 1; ``over_static_eta1_bound``: the gain there of an ideal split, right for every
    batch, changed at no cost, of divisible GPUs. ``over_always_sharing``: over GPUs that always do both, with the engines that
    are best in hindsight. ``over_static_of_eta1``: synchronous replanning over the best static split at bound 1.
stages (real processes of this machine, a tiny model; see `benchmarks.elastic_live`)
    ``rollout_to_train_s``, ``train_to_rollout_s``: medians of a change from the request until the worker supplies its new role,
    and of each of its stages; ``state_s`` until a joiner has the weights, in the background. ``trainer_blocked_s``: seconds
    that the core's training thread waited for joiners, in all steps.
rebucket (the same, with vLLM where it is installed)
    ``rebucket_s``, ``rebucket_back_s``: from the request until one engine of two ranks serves in place of two, and back.
live (the same, under the planner)
    ``live_to_train``, ``live_to_rollout``: changes by the run's own planner while lengths drifted, and
    ``live_realised_gain_frac``, their realised gain as a share of a step.
"""

from __future__ import annotations

from benchmarks import elastic_drift, elastic_live
from benchmarks.report import Figure, command_parser, emit

PARTS = ("drift", "stages", "rebucket", "live")


def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    parser = command_parser("elastic", __doc__, data=True)
    parser.add_argument("--part", choices=PARTS, nargs="+", default=list(PARTS), help="default: all")
    parser.add_argument(
        "--groups", type=int, nargs="+", default=[elastic_drift.GROUPS], help="groups of 16 in a batch (default 16)"
    )
    parser.add_argument("--iterations", type=int, help="of the drift, at most (default: the whole trace)")
    parser.add_argument("--full", action="store_true", help="simulate every static split to its end")
    parser.add_argument("--changes", type=int, default=6, help="role changes each way that are timed (default 6)")
    parser.add_argument("--live-iterations", type=int, default=36, help="of the run under the planner (default 36)")
    parser.add_argument("--stretch", type=int, default=12, help="iterations in a row that are alike (default 12)")
    options = parser.parse_args(arguments)
    figures: dict[str, Figure] = {}
    if "drift" in options.part:
        for groups in options.groups:
            figures |= elastic_drift.compare(options.data, groups, options.iterations, options.full)
    if "stages" in options.part:
        figures |= elastic_live.stages(options.changes)
    if "rebucket" in options.part:
        figures |= elastic_live.rebuckets(max(options.changes // 3, 1))
    if "live" in options.part:
        figures |= elastic_live.drift(options.live_iterations, options.stretch)
    emit("elastic", figures, arguments=arguments, as_json=options.json)


if __name__ == "__main__":
    main()
