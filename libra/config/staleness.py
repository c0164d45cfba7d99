"""Section ``staleness`` of a configuration: how old what a step consumes may be, and what runs ahead of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, Field

from libra.config.section import AtLeastOne, AtLeastZero, Section

OverAge = Literal["wait", "drop", "mask", "correct"]
TWINS: Final = ("run.eta", "staleness.eta")
"""One setting under two names: whichever is given, both have its value; the code reads the first."""


class StalenessSection(Section):
    """How old what a step consumes may be, how much is generated ahead of it, and what happens to what comes too late."""

    eta: AtLeastZero = 0
    """The bound, in weight versions: `run.eta` in full. Either sets both; two different numbers are refused."""
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
    in_flight: AtLeastOne | None = None
    """Batches generated at once: an iteration begins when the batch that many before it is taken. 1: while a step trains, only the
    next batch is generated. None: `run.eta` + 1, all that the bound allows."""
    over_age: OverAge = "wait"
    """What happens to a group that would be consumed beyond the bound. wait: it does not come to that, because batches wait for
    late groups. Otherwise no batch waits, and the batch that takes it leaves it out as a whole (drop), leaves its tokens beyond
    the bound out (mask), or trains on all of it, with the ratio that the algorithm corrects by (correct). What is left out counts
    in no denominator. Needs `run.eta` above 0 and `trainer.streaming` off: groups of a streamed step are never over age."""


def with_both(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The values of sections, with the bound under both of its names if one has it."""
    given = {section: _get(values.get(section), "eta") for section in ("run", "staleness")}
    for section, other in (("run", "staleness"), ("staleness", "run")):
        bound, into = given[other], values.get(section, {})
        if given[section] is None and bound is not None and isinstance(into, Mapping | BaseModel):
            changed = {**into, "eta": bound} if isinstance(into, Mapping) else into.model_copy(update={"eta": bound})
            values = {**values, section: changed}
    return values


def _get(section: Any, key: str) -> Any:
    """A value that a section was given, as a mapping or as a model; None if it was not, or is no such value."""
    if isinstance(section, BaseModel):
        return getattr(section, key) if key in section.model_fields_set else None
    value = section.get(key) if isinstance(section, Mapping) else None
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
