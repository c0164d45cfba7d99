"""Benchmarks: ``python -m benchmarks NAME --json``. Names and the folders of their files."""

BENCHMARKS = {
    name: folder
    for folder, names in {
        "live": "start rollout_overhead durability weight_sync priority_rewrite cmlfq_cost plan_memory plan_accuracy "
        "live_placement repair_lengths pipeline_live gateway sandbox elastic", "learning": "async_learning",
        "virtual": "planner cost_model pipeline actions length_skill", "systems": "systems", "peers": "vs_trl",
        "": "gpu",
    }.items()
    for name in names.split()
}  # fmt: skip
UNTIMED = ("learning", "virtual", "systems")
"""Folders whose figures do not depend on what else the machine does."""
