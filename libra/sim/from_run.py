"""The workload of a run that was: its trajectories as its store holds them, turn by turn."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from libra.errors import RunDirectoryError, StoreError
from libra.sim.workload import TrajectoryPlan, TurnPlan, Workload, checked
from libra.store.trajectories import TrajectoryStore
from libra.types import ToolOutcome, tool_outcome


def _outcome(path: Path, row: int, word: str) -> ToolOutcome:
    """How the tools of a stored turn came back; StoreError where its status is no outcome."""
    try:
        return tool_outcome(word)
    except ValueError as error:
        raise StoreError(f"{path}, row {row} of the turns: {error}; use the Libra that wrote it") from error


def workload_of_run(run_dir: Path, *, name: str = "sim") -> Workload:
    """Training trajectories of ``run_dir`` with their own tokens and tool seconds; RunDirectoryError where it has none.

    Iterations and groups are numbered anew, so that all iterations have equally many groups: as many as the first one. Groups
    of a last, incomplete iteration are left out. Prompts that were asked more than once keep their names.
    """
    path = run_dir / "trajectories.zarr"
    if not path.is_dir():
        raise RunDirectoryError(f"{run_dir}: holds no trajectories.zarr; name the directory of a run")
    with TrajectoryStore.open(path) as store:
        whole, turns = store.columns(), store.columns("turn")
    groups: dict[tuple[int, int], list[tuple[int, int]]] = {}
    columns = (whole["split"], whole["iteration"], whole["group"], whole["sample"])
    for row, (split, iteration, group, sample) in enumerate(zip(*(c.tolist() for c in columns), strict=True)):
        if split == "train" and int(whole["num_turns"][row]) > 0:
            groups.setdefault((iteration, group), []).append((sample, row))
    if not groups:
        raise RunDirectoryError(f"{run_dir}: no training trajectory is stored yet")
    first = min(groups)[0]
    per_iteration = sum(iteration == first for iteration, _ in groups)
    plans: list[TrajectoryPlan] = []
    names = whole["prompt_id"].tolist()
    asked = Counter(names[members[0][1]] for members in groups.values())
    for index, (_, members) in enumerate(sorted(groups.items())):
        iteration, group = divmod(index, per_iteration)
        if iteration and iteration == len(groups) // per_iteration:
            break
        for sample, row in sorted(members):
            start, count = int(whole["turn_offset"][row]), int(whole["num_turns"][row])
            rows = range(start, start + count)
            steps = tuple(
                TurnPlan(
                    max(1, int(turns["generated_tokens"][i])),
                    str(turns["tool"][i]) if turns["status"][i] else "",  # a last turn's call was not made any more
                    _outcome(path, i, str(turns["status"][i])),
                    max(0, int(turns["observation_tokens"][i])),
                    max(0.0, float(turns["tool_s"][i])) if turns["status"][i] else 0.0,
                )
                for i in rows
            )
            prompt = str(names[row]) if asked[names[row]] > 1 else ""
            plans.append(
                TrajectoryPlan(iteration, group, sample, int(turns["prompt_tokens"][start]), steps, "", prompt)
            )
    return checked(Workload(name, tuple(plans)), str(path))
