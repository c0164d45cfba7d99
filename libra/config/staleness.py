"""Section ``staleness`` of a configuration: how old what a step consumes may be, and what runs ahead of it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from libra.config.section import Section

OverAge = Literal["wait", "drop", "mask", "correct"]


class StalenessSection(Section):
    """How old what a step consumes may be, how much is generated ahead of it, and what happens to what comes too late."""

    window: Annotated[int, Field(ge=2)] | None = None
    """Weight versions alive at once: the newest, and all since the oldest that a group being generated has tokens of. A batch
    waits for the groups that would widen it. None: no bound of its own (`over_age` wait leaves `run.eta` + 1)."""
    versions: Literal["many", "one"] = "many"
    """Weight versions in one trajectory. many: engines take new weights at once, and their trajectories go on with them. one: a
    trajectory keeps the weights that it began with. An engine then takes new ones when all that began there have ended, and until
    then none begins there; a trajectory whose engine is lost begins again from its prompt. Not with `cluster.hybrid_workers`."""
    engines: Literal["emptied", "rounded"] = "emptied"
    """For `versions` one, which engines take new weights. emptied: each, when all that began there have ended. rounded: also those
    above their version's share of the engines, which is its share of the trajectories, rounded (DORA); the engine of a version with
    the fewest trajectories gives them to others of that version with room, with their KV if `rollout.kv_host_gib` is set."""
    over_age: OverAge = "wait"
    """What happens to a group that would be consumed beyond the bound. wait: it does not come to that, because batches wait for
    late groups. Otherwise no batch waits, and the batch that takes it leaves it out as a whole (drop), leaves its tokens beyond
    the bound out (mask), or trains on all of it, with the ratio that the algorithm corrects by (correct). What is left out counts
    in no denominator. Needs `run.eta` above 0 and `trainer.streaming` off: groups of a streamed step are never over age."""
