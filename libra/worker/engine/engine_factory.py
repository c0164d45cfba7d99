"""The engine of a rollout worker, from the configuration and the worker's declared resources.

ROLLOUT is the number of slots; TP, THREADS and PASS_US are declared if the engine differs from the
configuration. Engines with equal kind, tensor-parallel degree, number of threads and minimum
seconds per pass form one *bucket*.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from libra import keys
from libra.config import RunConfig, resolve_model
from libra.errors import ConfigError, EngineError, LibraError
from libra.facts import EngineKindFields
from libra.named_parts import built, is_named, named_function, named_part
from libra.worker.dask_worker import memory_bytes

if TYPE_CHECKING:
    from libra.rollout import RolloutEngine


ENGINE = "rollout.engine"
ENGINE_CALL = "f(model_dir=..., slots=..., max_context_tokens=..., version=...)"
_REQUIRED = ("model_dir", "slots", "max_context_tokens", "version")
_SERVED_TYPES = frozenset(
    {"llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "gemma2", "gemma3_text", "phi3", "smollm3"}
)
"""Model types that a transformers engine serves, which need no look at their code before a run."""


@dataclass(frozen=True, slots=True)
class Share:
    """An engine's part of a machine, as values of environment variables; empty if unset.

    ``cores``: a list per tensor-parallel rank ("0-3|4-7"), or "nobind". ``devices``: GPUs ("0,1").
    """

    cores: str = ""
    devices: str = ""

    @classmethod
    def of_worker(cls) -> Share:
        return cls(os.environ.get("VLLM_CPU_OMP_THREADS_BIND", ""), os.environ.get("CUDA_VISIBLE_DEVICES", ""))

    @classmethod
    def joined(cls, shares: Sequence[Share]) -> Share:
        """The union of shares, for one engine; the first ranks use the first share."""
        cores, devices = [share.cores for share in shares], [share.devices for share in shares]
        bound = all(cores) and "nobind" not in cores
        return cls("|".join(cores) if bound else "nobind", ",".join(devices) if all(devices) else "")


@dataclass(frozen=True, slots=True)
class EngineKind:
    """The settings in which engines of a run may differ."""

    engine: str  # "transformers", "vllm", or ``package.module:attribute`` of a user's engine
    slots: int
    tp: int = 1
    threads: int | None = None  # Torch threads per tensor-parallel rank; None: all cores
    share: Share | None = None  # the engine's part of the machine; None: the worker's part
    min_pass_s: float = 0.0  # minimum seconds per pass

    @classmethod
    def of(cls, config: RunConfig, supply: Mapping[str, float]) -> EngineKind:
        """The engine kind of a worker with resources ``supply``."""
        threads = int(supply.get(keys.THREADS, 0)) or config.cluster.threads
        tp, min_pass_s = int(supply.get(keys.TP, 0)) or config.rollout.tp, supply.get(keys.PASS_US, 0) / 1e6
        check_parallel(config.rollout.engine, tp)
        return cls(config.rollout.engine, int(supply[keys.ROLLOUT]), tp, threads, min_pass_s=min_pass_s)

    @property
    def fields(self) -> EngineKindFields:
        """The kind as plain data, for the scheduler."""
        return EngineKindFields(self.engine, self.bucket, self.tp, self.slots)

    @property
    def bucket(self) -> str:
        """Name of the engine's capacity class, such as ``vllm-tp2-threads1``."""
        threads = f"-threads{self.threads}" if self.threads is not None else ""
        return f"{self.engine}-tp{self.tp}{threads}" + (f"-pass{1e3 * self.min_pass_s:g}ms" if self.min_pass_s else "")


def check_parallel(engine: str, tp: int) -> None:
    """Raise EngineError if engines of this kind do not support tensor-parallel degree ``tp``."""
    if engine != "vllm" and tp not in (degrees := _degrees(engine)):
        can = f"has tp_degrees={degrees}" if is_named(engine) else "has no tensor parallelism"
        raise EngineError(
            f"a worker's engine is to have TP={tp}, but rollout.engine={engine} {can}; type rollout.engine=vllm, or start the "
            "worker with another TP"
        )


def _degrees(name: str) -> tuple[int, ...]:
    degrees = getattr(named_part(ENGINE, name), "tp_degrees", (1,)) if is_named(name) else (1,)
    if not isinstance(degrees, tuple | list) or not degrees or any(type(tp) is not int or tp < 1 for tp in degrees):
        raise ConfigError(f"{ENGINE}: {name!r} has tp_degrees={degrees!r}; it is a tuple of whole numbers, e.g. (1, 2)")
    return tuple(degrees)


def check_engine(config: RunConfig) -> None:
    """Raise ConfigError if the engine is not installed or its KV budget holds no full context."""
    rollout, name = config.rollout, config.rollout.engine
    if is_named(name):
        check_own_engine(name)
        degrees = _degrees(name)
        listed = [("cluster.engines", group.tp) for group in config.cluster.engines] or [("rollout.tp", rollout.tp)]
        for field, tp in listed:
            if tp not in degrees:
                allowed = " or ".join(map(str, degrees))
                raise ConfigError(
                    f"{field}: a degree of {tp}, and {name!r} has tp_degrees={degrees}; type tp {allowed}"
                )
        if rollout.chunk_tokens is not None and not getattr(named_part(ENGINE, name), "continues_turns", False):
            raise ConfigError(
                f"rollout.chunk_tokens: {name!r} does not declare that it continues a turn as if it were whole; leave "
                "rollout.chunk_tokens out, or set its continues_turns = True once its requests heed TurnRequest.generated"
            )
        return
    try:
        if name == "vllm":
            from libra.config.sections import check_vllm

            check_vllm()
        else:
            _check_transformers(config)
    except EngineError as error:
        raise ConfigError(str(error)) from error


def _check_transformers(config: RunConfig) -> None:
    rollout, cluster = config.rollout, config.cluster
    if cluster.scheduler is None:
        engines = sum(group.count for group in cluster.engines) if cluster.engines else cluster.rollout_workers
        _check_host_memory(rollout.kv_host_gib, engines)
    try:
        model = resolve_model(config.model.path)
        facts = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
        kind = facts.get("model_type")
    except (LibraError, OSError, ValueError, AttributeError):
        return  # the check of the model's files reports it, or a worker that fetches them
    if config.model.loader is None and isinstance(model, Path) and kind not in _SERVED_TYPES:
        from libra.rollout.weight_loading import check_served  # lazy: a second, for families that are not known

        check_served(model, rollout.max_context_tokens)
    given = [(name, gib) for name in ("kv_cache_gib", "kv_host_gib") if (gib := getattr(rollout, name)) is not None]
    if (
        given and isinstance(model, Path) and "num_hidden_layers" in facts
    ):  # else they are nested, and the engine checks
        from libra.rollout.capacity import kv_token_bytes, tokens_within  # lazy: the package imports torch

        for name, gib in given:
            token_bytes = kv_token_bytes(facts, config.model.dtype)
            tokens_within(gib, token_bytes, rollout.max_context_tokens, f"rollout.{name}")


def _check_host_memory(each_gib: float | None, engines: int = 1) -> None:
    has_gib = memory_bytes() / 2**30
    if each_gib is not None and each_gib * engines > has_gib:
        whose = f"for each of {engines} engines" if engines > 1 else "for an engine"
        raise ConfigError(
            f"rollout.kv_host_gib: {each_gib:g} GiB {whose} are more than the {has_gib:.1f} GiB of memory "
            f"that {socket.gethostname()} has; type rollout.kv_host_gib={has_gib / 2 / engines:.3g}, which is half of it, or less"
        )


def check_own_engine(name: str) -> None:
    """Raise ConfigError unless ``name`` is an `EngineFactory` with all methods of an engine."""
    from libra.rollout.engine import RolloutEngine

    factory = named_function(ENGINE, name, ENGINE_CALL, **dict.fromkeys(_REQUIRED))
    methods = [each for each in dir(RolloutEngine) if not each.startswith("_")] if isinstance(factory, type) else []
    lacking = [each for each in methods if not callable(getattr(factory, each, None))]
    if lacking:
        raise ConfigError(
            f"{ENGINE}: {name!r} lacks {', '.join(lacking)}; it must be a libra.rollout.engine.RolloutEngine"
        )


def make_engine(config: RunConfig, kind: EngineKind, model_dir: Path, version: int = 0) -> RolloutEngine:
    """An engine, not yet started, that serves the weights in ``model_dir`` as ``version``."""
    rollout = config.rollout
    limits: dict[str, Any] = {"slots": kind.slots, "max_context_tokens": rollout.max_context_tokens, "version": version}
    options: dict[str, Any] = {
        "dtype": config.model.dtype, "threads": kind.threads, "kv_cache_gib": rollout.kv_cache_gib
    }  # fmt: skip
    share: dict[str, Any] = {} if kind.share is None else {"cores": kind.share.cores, "devices": kind.share.devices}
    if kind.engine == "vllm":
        from libra.rollout.vllm.async_engine import VLLMEngine

        options |= {"tp": kind.tp, "keep_kv": rollout.keep_kv, "engine_args": rollout.engine_args}
        return VLLMEngine(model_dir, **limits, **options, **share)
    options |= {"min_pass_s": kind.min_pass_s, "device": config.cluster.device, "loader": config.model.loader}
    if is_named(kind.engine):
        from libra.rollout import RolloutEngine

        tp = {} if _degrees(kind.engine) == (1,) else {"tp": kind.tp}
        engine = built(ENGINE, kind.engine, ENGINE_CALL, {"model_dir": model_dir, **limits}, options | share | tp)
        if not isinstance(engine, RolloutEngine):
            raise ConfigError(
                f"{ENGINE}: {kind.engine!r} made a {type(engine).__name__}; it must be a libra.rollout.engine.RolloutEngine"
            )
        return engine
    _check_host_memory(rollout.kv_host_gib)  # of this machine, which need not be the driver's
    from libra.rollout.transformers_engine import TransformersEngine

    return TransformersEngine(
        model_dir,
        **limits,
        **options,
        exact_logprobs=rollout.exact_logprobs,
        speculate=rollout.speculate,
        host_kv_gib=rollout.kv_host_gib,
        record_routes=config.trainer.routes == "replay",
    )


def stats_of(engine: RolloutEngine) -> dict[str, float]:
    """An engine's counters for the ``version_served`` event."""
    stats = engine.stats()
    counted = ("generated_tokens", "prefilled_tokens", "cached_tokens", "steps", "drafted_tokens", "accepted_tokens")
    found: dict[str, float] = {name: getattr(stats, name) for name in counted}
    found |= {"busy_s": round(stats.busy_s, 6), "restarts": getattr(engine, "restarts", 0)}
    for rows, each in sorted(stats.drafted_by_rows.items()):
        found |= {f"drafted_tokens_batch{rows}": each.drafted, f"accepted_tokens_batch{rows}": each.accepted}
        if each.gain is not None:
            found[f"draft_gain_batch{rows}"] = round(each.gain, 4)
    return found
