"""Which trajectories a store has, in few bytes: a long run has a million, and its committer must know each."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from libra.types import TrajectoryId

_SHIFT = 32


class StoredIds:
    """A set of trajectory ids, 8 bytes each: per split and iteration, an array of (group, sample) in one number."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, int], NDArray[np.uint64]] = {}

    def add_columns(
        self, split: NDArray[np.str_], iteration: NDArray[np.int64], group: NDArray[np.int64], sample: NDArray[np.int64]
    ) -> None:
        """Add ids that are not in the set; the arrays are the columns of a store, all of one length."""
        places = _packed(group, sample)
        for name in np.unique(split).tolist():
            mine = split == name
            iterations, at = iteration[mine], places[mine]
            order = np.argsort(iterations, kind="stable")
            numbers, starts = np.unique(iterations[order], return_index=True)
            for number, part in zip(numbers.tolist(), np.split(at[order], starts[1:]), strict=True):
                before = self._found.get((str(name), number))
                self._found[str(name), number] = part.copy() if before is None else np.concatenate([before, part])

    def add(self, ids: Iterable[TrajectoryId]) -> None:
        """Add ids that are not in the set."""
        for where, new in _by_iteration(ids).items():
            before = self._found.get(where)
            places = _packed(*np.array([(i.group, i.sample) for i in new]).T)
            self._found[where] = places if before is None else np.concatenate([before, places])

    def among(self, ids: Iterable[TrajectoryId]) -> list[TrajectoryId]:
        """Those of ``ids`` that are in the set."""
        found: list[TrajectoryId] = []
        for where, asked in _by_iteration(ids).items():
            if where in self._found:
                places = _packed(*np.array([(i.group, i.sample) for i in asked]).T)
                there = np.isin(places, self._found[where]).tolist()
                found += [each for each, known in zip(asked, there, strict=True) if known]
        return found

    def __contains__(self, trajectory_id: TrajectoryId) -> bool:
        return bool(self.among([trajectory_id]))


def _packed(group: NDArray[np.int64], sample: NDArray[np.int64]) -> NDArray[np.uint64]:
    packed: NDArray[np.uint64] = (group.astype(np.uint64) << np.uint64(_SHIFT)) | sample.astype(np.uint64)
    return packed


def _by_iteration(ids: Iterable[TrajectoryId]) -> dict[tuple[str, int], list[TrajectoryId]]:
    found: dict[tuple[str, int], list[TrajectoryId]] = {}
    for each in ids:
        found.setdefault((each.split, each.iteration), []).append(each)
    return found
