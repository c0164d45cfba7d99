"""Cost of role changes, and replanning under drift, in real runs on this machine (`benchmarks.live.elastic_live`).

stages
    ``rollout_to_train_s``, ``train_to_rollout_s``: medians of a change from the request until the worker supplies its new role,
    and of each of its stages; ``state_s`` until a joiner has the weights, in the background. ``trainer_blocked_s``: seconds
    that the core's training thread waited for joiners, in all steps.
rebucket (with vLLM where it is installed)
    ``rebucket_s``, ``rebucket_back_s``: from the request until one engine of two ranks serves in place of two, and back.
live
    ``live_to_train``, ``live_to_rollout``: changes by the run's own planner while lengths drifted, and
    ``live_realised_gain_frac``, their realised gain as a share of a step.
"""

from __future__ import annotations

from benchmarks.live import elastic_live
from benchmarks.report import Figure, command_parser, emit

PARTS = ("stages", "rebucket", "live")


def main(arguments: list[str] | None = None) -> None:
    parser = command_parser("elastic", __doc__)
    parser.add_argument("--part", choices=PARTS, nargs="+", default=list(PARTS), help="default: all")
    parser.add_argument("--changes", type=int, default=6, help="role changes each way that are timed (default 6)")
    parser.add_argument("--live-iterations", type=int, default=36, help="of the run under the planner (default 36)")
    parser.add_argument("--stretch", type=int, default=12, help="iterations in a row that are alike (default 12)")
    options = parser.parse_args(arguments)
    figures: dict[str, Figure] = {}
    if "stages" in options.part:
        figures |= elastic_live.stages(options.changes)
    if "rebucket" in options.part:
        figures |= elastic_live.rebuckets(max(options.changes // 3, 1))
    if "live" in options.part:
        figures |= elastic_live.drift(options.live_iterations, options.stretch)
    emit("elastic", figures, arguments=arguments, as_json=options.json)
