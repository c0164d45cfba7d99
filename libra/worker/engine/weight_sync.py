"""Weight sync of a rollout worker without shared storage: it fetches a version from the nearest worker
that has it, into its own store.

The announcement of a version names its holders; if none of them answers, or the worker has just
joined, it queries the scheduler.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from libra import keys
from libra.errors import WeightsError
from libra.transport import Address
from libra.weights import WeightStore, WeightVersion
from libra.weights.transfer import WeightServer, fetch
from libra.worker.run_spec import RunSpec

if TYPE_CHECKING:
    from distributed import Worker

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerWeights:
    """A worker's store of versions, its fetcher (None on shared storage), and the server that offers them,
    if any."""

    store: WeightStore
    fetcher: WeightFetcher | None = None
    server: WeightServer | None = None

    @property
    def offered(self) -> tuple[str, int] | None:
        """Host and port at which this worker serves versions."""
        return None if self.server is None else self.server.address

    def announced(self, version: int, holders: Sequence[Sequence[Any]], digest: str | None) -> None:
        """The scheduler has announced a version and its holders."""
        if self.fetcher is not None:
            self.fetcher.announced(version, holders, digest)

    async def newest(self) -> WeightVersion | None:
        """The newest published version, in a directory that this worker can read; None if there is none."""
        if self.fetcher is not None:
            return await self.fetcher.newest()
        return await asyncio.to_thread(self.store.latest)

    def close(self) -> None:
        """Stop serving versions."""
        if self.server is not None:
            self.server.close()


def weights_of(worker: Worker, spec: RunSpec) -> WorkerWeights:
    """The weights of a worker. The one that trains always uses the run's own registry."""
    supply, peers = worker.state.total_resources, spec.config.weights.transfer == "peer"
    trains, generates = bool(supply.get(keys.TRAIN)), bool(supply.get(keys.ROLLOUT))
    if not peers or not (trains or generates):
        return WorkerWeights(WeightStore(spec.weights_dir))
    own = Path(worker.local_directory) / f"libra-weights-{spec.run}-e{spec.epoch}"
    store = WeightStore(spec.weights_dir if trains else own)
    fetcher = None if trains else WeightFetcher(worker, spec, store)
    server = WeightServer(store, spec.secret, urlsplit(worker.address).hostname or "127.0.0.1")
    return WorkerWeights(store, fetcher, server)


class _Source(NamedTuple):
    """A version, its digest if known, and its holders, nearest first."""

    version: int
    digest: str | None
    holders: tuple[Address, ...]


class WeightFetcher:
    """Fetches versions of one run to one worker's store; older ones are dropped according to
    ``store.keep_versions``."""

    def __init__(self, worker: Worker, spec: RunSpec, store: WeightStore) -> None:
        self._worker, self._spec, self._store = worker, spec, store
        self._source: _Source | None = None

    def announced(self, version: int, holders: Sequence[Sequence[Any]], digest: str | None) -> None:
        """Record an announcement of the scheduler."""
        if holders and (self._source is None or version >= self._source.version):
            self._source = _source(version, holders, digest)

    async def newest(self) -> WeightVersion | None:
        """The newest version announced, on this machine, if any; WeightsError if no server has it."""
        source, asked = self._source, False
        while True:
            try:
                if source is not None:
                    return await self._fetch(source)
            except WeightsError as error:
                failed = error
                logger.warning("run %s: %s; querying the scheduler for other holders", self._spec.run, error)
            answer = await self._worker.scheduler.libra_newest(run=self._spec.run, worker=self._worker.address)
            if answer["version"] < 0:
                return None
            if source is not None and asked and answer["version"] <= source.version:
                raise failed  # no newer version was announced meanwhile, for which its holders might have dropped it
            source = self._source = _source(answer["version"], answer["holders"], answer["digest"])
            asked = True

    async def _fetch(self, source: _Source) -> WeightVersion:
        found = await asyncio.to_thread(
            fetch, source.version, source.holders, self._store.root, secret=self._spec.secret, content=source.digest
        )
        await asyncio.to_thread(self._store.drop, self._spec.config.store.keep_versions)
        return found


def _source(version: int, holders: Sequence[Sequence[Any]], digest: str | None) -> _Source:
    return _Source(version, digest, tuple((str(host), int(port)) for host, port in holders))
