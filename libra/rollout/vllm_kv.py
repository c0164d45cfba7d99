"""vLLM's KV connector of ours: the KV of one request into a file in host memory, or from one, as the request asks.

Only vLLM's engine processes import it (``kv_connector_module_path``), because it needs vLLM; for a CPU's cache, whose blocks are
(blocks, KV heads, block tokens, 2 * head size) per layer. A request has `SAVE` or `LOAD` in its ``kv_transfer_params``.

Invariants
1. A file has whole blocks of all layers and all KV heads, whatever the tensor-parallel degree: each rank writes and reads the
   heads that it has (`libra.rollout.kv_heads`).
2. A request loads once, when it first starts: one that starts again, because the weights changed, computes its context.
3. A file without all of its ``.done`` marks, one per rank, is not complete.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)

from libra.rollout.kv_heads import heads_of, is_first_copy
from libra.rollout.vllm_settings import KV_FILE_TOKENS, KV_LOAD, KV_SAVE


@dataclass
class Work(KVConnectorMetadata):
    """What the ranks do at the beginning of a step: (request, file, its blocks), and for loads the first block of the file."""

    saves: list[tuple[str, str, list[int]]] = field(default_factory=list)
    loads: list[tuple[str, int, list[int]]] = field(default_factory=list)


class FileKV(KVConnectorBase_V1):
    """On the scheduler's side it decides, on each rank's it copies."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._block_tokens = int(vllm_config.cache_config.block_size)
        self._kv_heads = int(vllm_config.model_config.get_total_num_kv_heads())
        self._tp = int(vllm_config.parallel_config.tensor_parallel_size)
        self._work = Work()
        self._allocated: dict[str, tuple[str, int]] = {}
        self._loaded: set[str] = set()
        self._saved: set[str] = set()
        self._caches: list[torch.Tensor] = []

    # -- the scheduler's side

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Tokens that the file has beyond those that the prefix cache has."""
        given = request.kv_transfer_params or {}
        path = given.get(KV_LOAD)
        if not path or request.request_id in self._loaded or not Path(path).exists():
            return 0, False
        return max(0, min(int(given[KV_FILE_TOKENS]), request.num_tokens - 1) - num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Blocks are allocated for a request that starts."""
        self._loaded.add(request.request_id)
        if num_external_tokens > 0:
            self._allocated[request.request_id] = (request.kv_transfer_params[KV_LOAD], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Work:
        """The work of this step."""
        for new in scheduler_output.scheduled_new_reqs:
            if new.req_id in self._allocated:
                path, count = self._allocated.pop(new.req_id)
                first = (new.num_computed_tokens - count) // self._block_tokens
                last = math.ceil(new.num_computed_tokens / self._block_tokens)
                self._work.loads.append((path, first, list(new.block_ids[0][first:last])))
        self._allocated.clear()
        work, self._work = self._work, Work()
        return work

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        """A request has ended: keep its blocks until they are saved, if it asked for that."""
        self._loaded.discard(request.request_id)
        path, count = (
            (request.kv_transfer_params or {}).get(KV_SAVE),
            min(request.num_computed_tokens, request.num_tokens),
        )
        if not path or not count:
            return False, None
        blocks = list(block_ids)[: math.ceil(count / self._block_tokens)]
        self._work.saves.append((request.request_id, path, blocks))
        return True, None

    # -- a rank's side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """The caches of the layers, in order."""
        self._caches = list(kv_caches.values())

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Copy what this step asks for."""
        work = self._get_connector_metadata()
        assert isinstance(work, Work)
        rank = get_tensor_model_parallel_rank()
        heads = heads_of(rank, self._tp, self._kv_heads)
        for request_id, path, blocks in work.saves:
            if is_first_copy(rank, self._tp, self._kv_heads):
                file, at = self._file(path, len(blocks)), torch.tensor(blocks)
                for layer, cache in enumerate(self._caches):
                    file[layer, :, heads] = cache[at].view(torch.uint8).numpy()
            Path(f"{path}.done{rank}").touch()
            self._saved.add(request_id)
        for path, first, blocks in work.loads:
            file, at = self._file(path, None), torch.tensor(blocks)
            for layer, cache in enumerate(self._caches):
                part = np.ascontiguousarray(file[layer, first : first + len(blocks), heads])
                cache[at] = torch.from_numpy(part).view(cache.dtype)

    def _file(self, path: str, num_blocks: int | None) -> np.memmap[Any, Any]:
        """A file as bytes of (layers, blocks, KV heads, block tokens, rest); None: as many blocks as it has."""
        cache = self._caches[0]
        inner = (self._kv_heads, cache.shape[2], cache.shape[3] * cache.element_size())
        if num_blocks is None:
            num_blocks = Path(path).stat().st_size // (len(self._caches) * math.prod(inner))
        else:
            with Path(path).open("ab") as file:  # every rank may be the first
                file.truncate(len(self._caches) * num_blocks * math.prod(inner))
        return np.memmap(path, np.uint8, "r+", shape=(len(self._caches), num_blocks, *inner))

    def wait_for_layer_load(self, layer_name: str) -> None:
        """All layers are loaded before the step."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing is saved during a step."""

    def wait_for_save(self) -> None:
        """Nothing is saved during a step."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose blocks are saved, and free now."""
        saved, self._saved = self._saved, set()
        return saved or None, None
