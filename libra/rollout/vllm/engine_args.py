"""The setup of a vLLM engine: arguments, environment, KV memory. Imports vLLM inside functions."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

from libra.errors import EngineError, ModelError
from libra.rollout.capacity import DTYPE_BYTES, GIB, kv_token_bytes, read_model_config
from libra.rollout.engine import EngineSettings

PROBE = -1
"""vLLM priority of a probe: before every request, and served while the engine is paused."""
CPU_BATCHED_TOKENS = 4096
"""Most context tokens of one step on a CPU; at least one whole context."""
CPU_BLOCK_TOKENS = 32
"""Tokens per KV block on a CPU, a multiple of 32; vLLM's 128 reuses less."""
GENERATED = "libra_generated"
"""Name, among vLLM's ``extra_args`` of a request, of `libra.types.TurnRequest.generated`."""
OURS = frozenset({
    "model", "skip_tokenizer_init", "dtype", "max_model_len", "max_num_seqs", "tensor_parallel_size", "enable_prefix_caching",
    "scheduling_policy", "logprobs_mode", "generation_config", "disable_log_stats", "use_tqdm_on_load", "worker_extension_cls",
    "scheduler_cls", "kv_cache_memory_bytes", "block_size", "distributed_executor_backend", "async_scheduling",
})  # fmt: skip
"""Arguments of vLLM that Libra sets itself."""
PARENT = "LIBRA_ENGINE_PARENT"
"""Environment variable: id of the process that starts an engine; when it ends, the engine ends."""
BIND, DEVICES = "VLLM_CPU_OMP_THREADS_BIND", "CUDA_VISIBLE_DEVICES"
"""Environment variables with the cores and the GPUs that an engine may use."""


@dataclass(frozen=True, slots=True)
class VLLMSettings(EngineSettings):
    """Settings of a `VLLMEngine`. ``threads`` and ``kv_cache_gib`` are per rank. By default the
    ranks divide the cores of this process, and the KV cache has room for all slots at full length
    (CPU) or what ``gpu_memory_utilization`` leaves (GPU)."""

    tp: int = 1  # tensor-parallel degree: one process and one GPU, or ``threads`` cores, per rank
    keep_kv: bool = False  # whether an update in flight keeps the KV that older weights computed
    cores: str | None = None  # a list per rank, "0-3|4-7"; by default as in the environment
    devices: str | None = None  # GPUs, "0,1"; by default as in the environment
    engine_args: Mapping[str, Any] = field(default_factory=dict)  # further arguments of ``AsyncEngineArgs``

    def __post_init__(self) -> None:
        EngineSettings.__post_init__(self)
        if self.tp < 1:
            raise EngineError(f"engine: got tp={self.tp}; allowed: at least 1")
        if self.dtype not in DTYPE_BYTES:
            raise ModelError(f"dtype: got {self.dtype!r}; allowed: {', '.join(DTYPE_BYTES)}")


def kv_bytes(config: Mapping[str, Any], settings: VLLMSettings) -> int:
    """KV cache of one rank with room for every slot and one probe at full length."""
    per_token = kv_token_bytes(config, settings.dtype, settings.tp) // settings.tp
    blocks = (settings.slots + 1) * (math.ceil((settings.max_context_tokens + 1) / CPU_BLOCK_TOKENS) + 1) + 2
    return per_token * blocks * CPU_BLOCK_TOKENS


def max_model_tokens(config: Mapping[str, Any], settings: VLLMSettings) -> int:
    """vLLM's ``max_model_len``: the longest context and one more token for scoring, if possible."""
    limit = config.get("max_position_embeddings")
    wanted = settings.max_context_tokens + 1
    return settings.max_context_tokens if limit is not None and wanted > int(limit) else wanted


def engine_args(settings: VLLMSettings, *, on_cpu: bool) -> Any:
    """``AsyncEngineArgs`` of an engine; ModelError if an argument would give wrong tokens."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    config = read_model_config(settings.model_dir)
    given = dict(settings.engine_args)
    known = {each.name for each in fields(AsyncEngineArgs)}
    if wrong := [name for name in given if name in OURS or name not in known]:
        why = "Libra sets itself" if wrong[0] in OURS else "vLLM does not have"
        raise ModelError(f"rollout.engine_args: got {wrong[0]}, which {why}; leave it out")
    if settings.kv_cache_gib is not None:
        given["kv_cache_memory_bytes"] = int(settings.kv_cache_gib * GIB)
    elif on_cpu:
        given["kv_cache_memory_bytes"] = kv_bytes(config, settings)
    if on_cpu:
        given |= {"block_size": CPU_BLOCK_TOKENS, "distributed_executor_backend": "mp"}
        # With a context computed in parts, vLLM 0.32 draws tokens, discards them and rewinds the request's generator; one on a CPU
        # cannot be rewound, and the engine process dies.
        given |= {
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(CPU_BATCHED_TOKENS, max_model_tokens(config, settings)),
        }
    if "kv_transfer_config" in given:
        given["kv_transfer_config"] = _kv_transfer(given["kv_transfer_config"])
    kind = "ProbeScheduler" if on_cpu else "AsyncProbeScheduler"
    if "speculative_config" in given:
        if on_cpu:  # vLLM 0.32 tests drafts on a CPU with another temperature, and their log-probabilities are NaN
            raise ModelError(
                f"rollout.engine_args: got speculative_config={given['speculative_config']}; vLLM "
                "speculates on GPUs only; leave it out"
            )
        # Drafts follow a step's tokens, so a step is scheduled after the one before it.
        kind, given["async_scheduling"] = "ProbeScheduler", False
    given.setdefault("enforce_eager", on_cpu)  # compiling takes minutes on a CPU
    return AsyncEngineArgs(
        model=str(settings.model_dir),
        skip_tokenizer_init=True,
        dtype=settings.dtype,
        max_model_len=max_model_tokens(config, settings),
        max_num_seqs=settings.slots + 1,  # and a probe
        tensor_parallel_size=settings.tp,
        enable_prefix_caching=True,
        scheduling_policy="priority",
        logprobs_mode="processed_logprobs",
        generation_config="vllm",
        disable_log_stats=True,
        use_tqdm_on_load=False,
        worker_extension_cls="libra.rollout.vllm.worker_extension.LibraWorker",
        scheduler_cls=f"libra.rollout.vllm.probe_scheduler.{kind}",
        **given,
    )


def _kv_transfer(given: Mapping[str, Any]) -> Any:
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    config = KVTransferConfig(**{"kv_role": "kv_both"} | dict(given))
    connector = KVConnectorFactory.get_connector_class(config)
    if connector.reset_cache is KVConnectorBase_V1.reset_cache or config.kv_connector == "MultiConnector":
        raise ModelError(
            f"rollout.engine_args: kv_transfer_config: {config.kv_connector} has no reset_cache and would keep KV of "
            "older weights; type rollout.engine_args={kv_transfer_config: {kv_connector: OffloadingConnector}}, "
            "or name another one that has it"
        )
    return config


@contextmanager
def environment(settings: VLLMSettings, *, on_cpu: bool) -> Iterator[None]:
    """Within this context, the environment for the start of an engine process. By default threads
    are not bound to cores, which two engines of one machine would share."""
    before = dict(os.environ)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = settings.threads or max(1, cores // settings.tp)
    os.environ.update(
        {
            "OMP_NUM_THREADS": str(threads),
            BIND: settings.cores or before.get(BIND, "nobind"),
            **({DEVICES: settings.devices} if settings.devices else {}),
            "VLLM_LOGGING_LEVEL": before.get("VLLM_LOGGING_LEVEL", "ERROR"),
            "VLLM_NO_USAGE_STATS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            PARENT: str(os.getpid()),
            # In eager mode only a count of likelier tokens would be compiled, which takes 20 s and needs a compiler.
            **({"TORCHDYNAMO_DISABLE": "1"} if settings.engine_args.get("enforce_eager", True) and on_cpu else {}),
        }
    )
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)
