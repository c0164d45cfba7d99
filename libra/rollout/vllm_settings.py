"""The setup of a vLLM engine: arguments, environment, KV memory, and the error if vLLM is missing.

vLLM is imported inside functions only: Libra works without it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from libra.config.engine_package import check_installed as check_installed
from libra.config.engine_package import is_installed as is_installed
from libra.errors import EngineError, ModelError
from libra.rollout.draft_length import LENGTHS
from libra.rollout.engine import EngineSettings
from libra.rollout.engine_capacity import DTYPE_BYTES, GIB, kv_token_bytes, with_usual_names
from libra.rollout.kv_heads import heads_of
from libra.seals import parsed_json

PROBE = -1
"""vLLM priority of a probe: before every request, and the only one that runs while the engine is paused."""
CPU_BATCHED_TOKENS = 4096
"""Maximum context tokens that one step of an engine on a CPU computes; at least one whole context."""
CPU_BLOCK_TOKENS = 32
"""Tokens per KV block on a CPU, a multiple of 32 for its kernels. vLLM's own choice, 128, would reuse no shorter context."""
KV_SAVE, KV_LOAD, KV_FILE_TOKENS = "libra_save", "libra_load", "libra_tokens"
"""In a request's ``kv_transfer_params``: the file to which its KV goes, the one from which it comes, and its number of tokens."""
GENERATED = "libra_generated"
"""Name, among vLLM's ``extra_args`` of a request, of `libra.types.TurnRequest.generated`."""
GROUP = "libra_group"
"""Name, among vLLM's ``extra_args`` of a request, of its group and its trajectory, for drafts."""
PARENT = "LIBRA_ENGINE_PARENT"
"""Environment variable with the id of the process that starts an engine; the engine's process ends when that one has
ended."""
BIND, DEVICES = "VLLM_CPU_OMP_THREADS_BIND", "CUDA_VISIBLE_DEVICES"
"""Environment variables with the cores and the GPUs that an engine may use."""


@dataclass(frozen=True, slots=True)
class VLLMSettings(EngineSettings):
    """Settings of a `VLLMEngine`.

    ``threads`` and ``kv_cache_gib`` are per tensor-parallel rank; None: the cores this process may use, divided among the ranks;
    and what all slots need at full length on a CPU, what `gpu_memory_frac` leaves on a GPU.

    Attributes
    ----------
    tp : int
        Tensor-parallel degree: one process and one GPU, or ``threads`` cores, per rank.
    keep_kv : bool
        Whether an update in flight keeps the KV that older weights computed.
    gpu_memory_frac : float
        Share of a GPU's memory that the engine may take.
    eager : bool or None
        Whether the model runs as written, without compilation. None: on a CPU, where compiling takes minutes.
    cores, devices : str or None
        Cores and GPUs of its processes: a list of cores per rank, as "0-3|4-7", and GPUs, as "0,1". None: as in the
        environment (``VLLM_CPU_OMP_THREADS_BIND``, ``CUDA_VISIBLE_DEVICES``).
    host_kv_gib : float or None
        Host memory for KV that comes from another engine, on a CPU only; None: there is none, and KV is not exchanged.
    speculate : bool
        Draft tokens from the other samples of a request's group where that pays off (`libra.rollout.vllm_drafts`).
    """

    tp: int = 1
    keep_kv: bool = False
    gpu_memory_frac: float = 0.9
    eager: bool | None = None
    cores: str | None = None
    devices: str | None = None
    host_kv_gib: float | None = None
    speculate: bool = False

    def __post_init__(self) -> None:
        EngineSettings.__post_init__(self)
        if self.tp < 1:
            raise EngineError(f"engine: got tp={self.tp}; allowed: at least 1")
        if self.dtype not in DTYPE_BYTES:
            raise ModelError(f"dtype: got {self.dtype!r}; allowed: {', '.join(DTYPE_BYTES)}")


def read_model_config(model_dir: Path) -> dict[str, Any]:
    """``config.json`` of a model directory, text part only; ModelError if there is none."""
    path = Path(model_dir) / "config.json"
    try:
        config = parsed_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{model_dir}: no config.json there; give a directory in Hugging Face layout") from error
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read as a model's configuration: {error}") from error
    text = with_usual_names(config.get("text_config") or config)
    return text | {"tie_word_embeddings": config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))}


def kv_bytes(config: Mapping[str, Any], settings: VLLMSettings) -> int:
    """KV cache of one rank with room for every slot and one probe at full length, so that no request is ever preempted."""
    per_token = kv_token_bytes(config, settings.dtype, settings.tp) // settings.tp
    blocks = (settings.slots + 1) * (math.ceil((settings.max_context_tokens + 1) / CPU_BLOCK_TOKENS) + 1) + 2
    return per_token * blocks * CPU_BLOCK_TOKENS


def max_model_tokens(config: Mapping[str, Any], settings: VLLMSettings) -> int:
    """vLLM's ``max_model_len``: one above the longest context, because scoring one takes one more token, if the model
    allows it."""
    limit = config.get("max_position_embeddings")
    wanted = settings.max_context_tokens + 1
    return settings.max_context_tokens if limit is not None and wanted > int(limit) else wanted


def engine_args(settings: VLLMSettings, *, on_cpu: bool) -> Any:
    """``AsyncEngineArgs`` of an engine; ModelError if it cannot exchange KV and has to."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    config = read_model_config(settings.model_dir)
    given: dict[str, Any] = {}
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
    else:
        given["gpu_memory_utilization"] = settings.gpu_memory_frac
    if settings.host_kv_gib is not None:
        if not on_cpu:
            raise ModelError(
                f"rollout.kv_host_gib: got {settings.host_kv_gib:g}; vLLM engines exchange KV on CPUs only; type "
                "rollout.kv_host_gib=null"
            )
        from vllm.config import KVTransferConfig

        heads_of(0, settings.tp, int(config.get("num_key_value_heads") or config["num_attention_heads"]))
        given["kv_transfer_config"] = KVTransferConfig(
            kv_connector="FileKV", kv_connector_module_path="libra.rollout.vllm_kv", kv_role="kv_both"
        )
    kind = "ProbeScheduler" if on_cpu else "AsyncProbeScheduler"
    if settings.speculate:
        # Drafts follow a step's tokens, so a step is scheduled after the one before it, on a GPU too.
        kind, given["async_scheduling"] = "DraftingScheduler", False
        given["speculative_config"] = {
            "method": "custom_class",
            "model": "libra.rollout.vllm_coupled.NoDrafts",
            "num_speculative_tokens": max(LENGTHS),
        }
        if on_cpu:
            given["distributed_executor_backend"] = "libra.rollout.vllm_coupled.RankProcesses"
    return AsyncEngineArgs(
        model=str(settings.model_dir),
        skip_tokenizer_init=True,
        dtype=settings.dtype,
        max_model_len=max_model_tokens(config, settings),
        max_num_seqs=settings.slots + 1,  # and a probe
        tensor_parallel_size=settings.tp,
        enforce_eager=on_cpu if settings.eager is None else settings.eager,
        enable_prefix_caching=True,
        scheduling_policy="priority",
        logprobs_mode="processed_logprobs",
        generation_config="vllm",
        disable_log_stats=True,
        use_tqdm_on_load=False,
        worker_extension_cls="libra.rollout.vllm_worker.LibraWorker",
        scheduler_cls=f"libra.rollout.vllm_scheduler.{kind}",
        **given,
    )


@contextmanager
def environment(settings: VLLMSettings, *, on_cpu: bool) -> Iterator[None]:
    """The environment in which an engine process starts; afterwards that of this process is as before.

    A binding of threads to cores in the environment (``VLLM_CPU_OMP_THREADS_BIND``, one list per rank, as "0-3|4-7") is kept,
    unless the settings have another one. Without one threads are not bound: two engines of one machine would share the cores.
    """
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
            **({"TORCHDYNAMO_DISABLE": "1"} if settings.eager is not False and on_cpu else {}),
        }
    )
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)
