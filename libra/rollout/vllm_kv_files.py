"""KV objects of a vLLM engine, on the side of Libra: the pool, and the files through which they reach its processes.

vLLM keeps the KV of ended requests in its prefix cache, as long as there is room. An export asks for one more token of the
trajectory's tokens; the connector (`libra.rollout.vllm_kv`) writes the blocks to a file. An import is a file from which the
trajectory's next request begins.

Invariants
1. A file of older weights is removed before newer ones are loaded, so no request that starts later reads it.
2. Files are in memory (``/dev/shm``) where the machine has that, and are removed when their request has ended; those of a worker
   that was killed, when the next engine of this machine starts.
"""

from __future__ import annotations

import asyncio
import logging
import platform
import tempfile
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from libra.errors import EngineError, KVRefused
from libra.rollout.engine_capacity import GIB
from libra.rollout.host_kv import HostKV
from libra.rollout.kv_object import KVObject
from libra.rollout.memory_files import MemoryFiles
from libra.rollout.vllm_process import Core, VLLMJob
from libra.rollout.vllm_settings import CPU_BLOCK_TOKENS, KV_FILE_TOKENS, KV_LOAD, KV_SAVE, VLLMSettings
from libra.types import StopReason, TurnOutput

logger = logging.getLogger(__name__)

KEPT_TOKENS = 4096
"""Trajectories whose tokens are kept for an export."""
SAVED_S = 10.0
"""Seconds within which the engine's processes must have written a file."""
LOOK_S = 0.001
_MEMORY = Path("/dev/shm")


class VLLMKv:
    """Of one engine, in its event loop."""

    def __init__(self, settings: VLLMSettings, config: Mapping[str, Any]) -> None:
        assert settings.host_kv_gib is not None
        self.pool, self._tp = HostKV(int(settings.host_kv_gib * GIB)), settings.tp
        heads = int(config.get("num_key_value_heads") or config["num_attention_heads"])
        head_dim = int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
        # A CPU's kernels pack keys inside a block, each instruction set in its own way.
        self.layout = (
            f"vllm-{config['num_hidden_layers']}x{heads}x{CPU_BLOCK_TOKENS}x{2 * head_dim}-{settings.dtype}-"
            f"{platform.machine()}-{torch.backends.cpu.get_cpu_capability()}"
        )
        self._files = MemoryFiles("libra-kv-", _MEMORY if _MEMORY.is_dir() else Path(tempfile.gettempdir()))
        self._tokens: OrderedDict[str, tuple[int, NDArray[np.int32]]] = OrderedDict()
        self._serial = 0

    def close(self) -> None:
        """Remove all files."""
        self._files.close()

    @property
    def trajectories(self) -> list[str]:
        """Those whose KV may be in the prefix cache, the last one first."""
        return list(reversed(self._tokens))

    def forget(self, trajectory_id: str) -> None:
        """The trajectory has ended."""
        self._tokens.pop(trajectory_id, None)
        self.pool.drop(trajectory_id)

    def loaded(self, version: int) -> None:
        """The engine is paused and about to serve these weights: nothing older is read from now on."""
        self.pool.drop_before(version)
        self._tokens.clear()
        for file in self._files.path.iterdir():
            file.unlink(missing_ok=True)

    def ended(self, job: VLLMJob, outcome: TurnOutput | Exception) -> None:
        """A request has ended, and its KV is in the engine's prefix cache."""
        if isinstance(outcome, TurnOutput) and outcome.stop_reason is not StopReason.ABORT:
            tokens = np.concatenate([job.request.context_ids, outcome.token_ids])
            self._tokens[job.name] = job.version, tokens
            self._tokens.move_to_end(job.name)
            if len(self._tokens) > KEPT_TOKENS:
                self._tokens.popitem(last=False)

    @contextmanager
    def brought(self, job: VLLMJob) -> Iterator[dict[str, Any] | None]:
        """The ``kv_transfer_params`` of a request that starts from an object of the pool; None without one."""
        kv = self.pool.get(job.name)
        if kv is None:
            yield None
            return
        self.pool.drop(job.name)
        try:
            kv.check(job.version, self.layout, job.request.context_ids)
        except KVRefused as error:
            logger.info("%s; it is computed again", error)
            yield None
            return
        path = self._path()
        kv.data.tofile(path)
        try:
            yield {KV_LOAD: str(path), KV_FILE_TOKENS: kv.num_tokens}
        finally:
            path.unlink(missing_ok=True)

    async def export(self, core: Core, trajectory_id: str, version: int) -> KVObject | None:
        """The KV of a trajectory between two turns, kept in the pool; None if there is none, or no room for it."""
        there = self.pool.get(trajectory_id)
        if there is not None or trajectory_id not in self._tokens:
            return there
        computed_by, tokens = self._tokens[trajectory_id]
        if computed_by != version:
            return None
        path = self._path()
        try:
            await core.one_more(tokens.tolist(), version, {KV_SAVE: str(path)})
            deadline_s = time.monotonic() + SAVED_S
            while not self._is_written(path):
                if time.monotonic() > deadline_s:
                    raise EngineError(f"{path}: the engine's processes did not write its KV within {SAVED_S:g} s")
                await asyncio.sleep(LOOK_S)
            data = np.fromfile(path, np.uint8)
        finally:
            self._remove(path)
        kv = KVObject.of(trajectory_id, version, tokens, self.layout, data)
        return kv if self.pool.put(kv) else None

    def _is_written(self, path: Path) -> bool:
        return all(Path(f"{path}.done{rank}").exists() for rank in range(self._tp))

    def _remove(self, path: Path) -> None:
        for file in (path, *(Path(f"{path}.done{rank}") for rank in range(self._tp))):
            file.unlink(missing_ok=True)

    def _path(self) -> Path:
        self._serial += 1
        return self._files.path / str(self._serial)
