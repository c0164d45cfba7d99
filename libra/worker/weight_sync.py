"""How a rollout worker without shared storage comes to a version: from the nearest worker that has it, into a store of its own.

Whom to ask comes with the announcement of the version; where none of those answers any more, or the worker has just joined,
the scheduler is asked.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from libra import keys
from libra.errors import WeightsError
from libra.weights import WeightStore, WeightVersion
from libra.weights.transfer import Holder, WeightServer, fetch
from libra.worker.run_spec import RunSpec

if TYPE_CHECKING:
    from distributed import Worker

logger = logging.getLogger(__name__)


def weights_of(worker: Worker, spec: RunSpec) -> tuple[WeightStore, WeightFetcher | None, WeightServer | None]:
    """Where a worker keeps versions, how it fetches them (None: they are there), and where it offers them (None: nowhere).

    The worker that trains always uses the run's own registry.
    """
    supply, peers = worker.state.total_resources, spec.config.weights.transfer == "peer"
    trains, generates = bool(supply.get(keys.TRAIN)), bool(supply.get(keys.ROLLOUT))
    if not peers or not (trains or generates):
        return WeightStore(spec.weights_dir), None, None
    own = Path(worker.local_directory) / f"libra-weights-{spec.run}-e{spec.epoch}"
    store = WeightStore(spec.weights_dir if trains else own)
    fetcher = None if trains else WeightFetcher(worker, spec, store)
    return store, fetcher, WeightServer(store, spec.secret, urlsplit(worker.address).hostname or "127.0.0.1")


class _Source(NamedTuple):
    """A version, its digest (None: not known) and who has it, nearest first."""

    version: int
    digest: str | None
    holders: tuple[Holder, ...]


class WeightFetcher:
    """Fetches versions of one run to one worker's store; older ones are dropped as ``store.keep_versions`` says."""

    def __init__(self, worker: Worker, spec: RunSpec, store: WeightStore) -> None:
        self._worker, self._spec, self._store = worker, spec, store
        self._source: _Source | None = None

    def announced(self, version: int, holders: Sequence[Sequence[Any]], digest: str | None) -> None:
        """Take note of what the scheduler said."""
        if holders and (self._source is None or version >= self._source.version):
            self._source = _source(version, holders, digest)

    async def newest(self) -> WeightVersion | None:
        """The newest version announced, on this machine; None where none is published.

        Raises
        ------
        WeightsError
            Nobody gives it.
        """
        source, asked = self._source, False
        while True:
            try:
                if source is not None:
                    return await self._fetch(source)
            except WeightsError as error:
                failed = error
                logger.warning("run %s: %s; the scheduler is asked who else has it", self._spec.run, error)
            answer = await self._worker.scheduler.libra_newest(run=self._spec.run, worker=self._worker.address)
            if answer["version"] < 0:
                return None
            if source is not None and asked and answer["version"] <= source.version:
                raise failed  # while it was fetched no newer one came, for which its holders might have dropped it
            source = self._source = _source(answer["version"], answer["holders"], answer["digest"])
            asked = True

    async def _fetch(self, source: _Source) -> WeightVersion:
        found = await asyncio.to_thread(
            fetch,
            source.version,
            source.holders,
            self._store.root,
            secret=self._spec.secret,
            content=source.digest,
        )
        await asyncio.to_thread(self._store.drop, self._spec.config.store.keep_versions)
        return found


def _source(version: int, holders: Sequence[Sequence[Any]], digest: str | None) -> _Source:
    return _Source(version, digest, tuple(Holder(str(host), int(port)) for host, port in holders))
