"""The files of ``model.path`` and the published weight versions on a worker.

Without shared storage a rollout worker fetches a version from the nearest worker that has it. The
announcement of a version names such workers; if none answers, or the worker has just joined, the
worker queries the scheduler.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from libra import keys
from libra.config.model_paths import whole_model
from libra.errors import ModelError, WeightsError
from libra.transport import Address
from libra.untrusted import shown_line
from libra.weights import WeightStore, WeightVersion
from libra.weights.transfer import WeightServer, fetch
from libra.worker.run_spec import RunSpec

if TYPE_CHECKING:
    from distributed import Worker

logger = logging.getLogger(__name__)

ONE_MODEL_AT_A_TIME = asyncio.Lock()
"""transformers builds a model under a device context of the whole process: two runs that build at once
would get models without data."""
NOT_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".gguf", ".pt")
"""Suffixes of a model's files that a version replaces."""


def local_model(model: str) -> Path:
    """Directory of a model on this machine; downloads a Hugging Face id not in the cache."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        fetched = Path(snapshot_download(model, ignore_patterns=["*.gguf", "*.onnx", "*.h5", "*.msgpack"]))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        why = shown_line(str(error).partition("\n")[0])
        raise ModelError(
            f"model.path: {model!r} is neither a directory in {Path.cwd()} nor in the cache {constants.HF_HUB_CACHE}, and was not "
            f"downloaded from {constants.ENDPOINT} ({why}); type libra/tiny-arithmetic, which is here, a directory, or "
            f"where there is a network: hf download {model}, and copy that cache"
        ) from None
    return whole_model(fetched, model)


def collect_frozen() -> None:
    """Free a closed engine's or replica's modules, which are frozen and in reference cycles."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def link_model(model_dir: Path, version: WeightVersion, directory: Path) -> None:
    """Fill ``directory`` with links to a model's other files and to a version's weights.

    The weights are hard-linked if possible: a restarted engine may read them after the store drops
    them.
    """
    for path in Path(model_dir).iterdir():
        if not path.name.endswith(NOT_WEIGHTS):
            (directory / path.name).symlink_to(path.resolve())
    weights = directory / version.path.name
    try:
        os.link(version.path.resolve(), weights)
    except OSError:  # another file system, or one without such links
        weights.symlink_to(version.path.resolve())


class _Source(NamedTuple):
    """A version, its digest if known, and addresses of workers that have it, nearest first."""

    version: int
    digest: str | None
    holders: tuple[Address, ...]


class WorkerWeights:
    """A worker's store of versions; a training worker always uses the run's own registry.

    With ``weights.transfer=peer``, its versions are offered to other workers at ``offered``.
    """

    def __init__(self, worker: Worker, spec: RunSpec) -> None:
        supply = worker.state.total_resources
        trains, generates = bool(supply.get(keys.TRAIN)), bool(supply.get(keys.ROLLOUT))
        peers = spec.config.weights.transfer == "peer" and (trains or generates)
        self._worker, self._spec, self._fetches = worker, spec, peers and not trains
        own = Path(worker.local_directory) / f"libra-weights-{spec.run}-e{spec.epoch}"
        self.store = WeightStore(own if self._fetches else spec.weights_dir)
        host = urlsplit(worker.address).hostname or "127.0.0.1"
        self._server = WeightServer(self.store, spec.secret, host) if peers else None
        self.offered: tuple[str, int] | None = None if self._server is None else self._server.address
        self._source: _Source | None = None

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    def announced(self, version: int, holders: Sequence[Sequence[Any]], digest: str | None) -> None:
        """Note an announced version and the workers that have it."""
        if holders and (self._source is None or version >= self._source.version):
            self._source = _source(version, holders, digest)

    async def newest(self) -> WeightVersion | None:
        """The newest version, readable here, or None. Raises WeightsError if no worker has it."""
        if not self._fetches:
            return await asyncio.to_thread(self.store.latest)
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
                raise failed  # no newer version was announced, for which workers might have dropped this one
            source = self._source = _source(answer["version"], answer["holders"], answer["digest"])
            asked = True

    async def _fetch(self, source: _Source) -> WeightVersion:
        found = await asyncio.to_thread(
            fetch, source.version, source.holders, self.store.root, secret=self._spec.secret, content=source.digest
        )
        await asyncio.to_thread(self.store.drop, self._spec.config.store.keep_versions)
        return found


def _source(version: int, holders: Sequence[Sequence[Any]], digest: str | None) -> _Source:
    return _Source(version, digest, tuple((str(host), int(port)) for host, port in holders))
