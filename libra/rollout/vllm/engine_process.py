"""One vLLM engine process, driven from one event loop: requests, weights, probes.

`VLLMEngine` creates another `Core` if a process dies. Errors of vLLM become EngineError.

1. A token's version is the label that the engine process gave the step that drew the token.
2. After `load` no later request reads KV of older weights: the KV is dropped, or, with ``keep_kv``,
   filed under the version that its request started with.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from libra.config.sections import check_vllm
from libra.errors import EngineError, LibraError, ModelError
from libra.projections import draw_input, draw_rows, generator_of, is_embedding, numbers_of
from libra.rollout.capacity import PassMeter
from libra.rollout.engine import packed_priority
from libra.rollout.slot_table import QueuedJob
from libra.rollout.vllm.engine_args import GENERATED, PROBE, VLLMSettings, engine_args, environment
from libra.rollout.vllm.worker_extension import Part
from libra.types import StopReason, TurnOutput

logger = logging.getLogger(__name__)

_BUILDING = threading.Lock()
"""Held while an engine is built, because its environment is the whole process's."""
_WARM_UP_TOKENS = 4
PROBE_ID = "probe-"
"""Prefix of the name of a probe's request."""
SHUTDOWN_S = 5.0
"""Seconds until a process with a GPU is killed; on a CPU, which has nothing to save, 0."""


@dataclass(slots=True)
class VLLMJob(QueuedJob):
    """A request of a vLLM engine."""

    version: int = 0  # of the weights when the request started
    handle: str = ""  # vLLM's name of the request
    answer: Any = None  # the future that the caller awaits
    task: Any = None  # serves the request


class EngineGone(EngineError):
    """The engine process has died; only a new one can continue."""


class Core:
    """A running engine process and its client, made by `Core.start`."""

    def __init__(self, llm: Any, settings: VLLMSettings, meter: PassMeter | None = None) -> None:
        self.llm, self.settings, self.passes = llm, settings, PassWatch(meter or PassMeter())
        self.steps = self.generated_tokens = 0
        self._probes = 0
        self._count_steps()

    @classmethod
    async def start(cls, settings: VLLMSettings, version: int, meter: PassMeter | None = None) -> Core:
        """Start the process, load the model and warm up; blocks this loop for 20 s or more."""
        check_vllm()
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM

        core = None
        try:
            on_cpu = bool(current_platform.is_cpu())
            with _BUILDING, environment(settings, on_cpu=on_cpu):
                llm = AsyncLLM.from_engine_args(engine_args(settings, on_cpu=on_cpu))
            core = cls(llm, settings, meter)
            await llm.update_weight_version(str(version))
            await llm.collective_rpc("libra_continue_turns")
            for temperature in (0.0, 1.0):  # kernels are compiled at their first use, for both ways of sampling
                await core._generate([1] * 4, _WARM_UP_TOKENS, temperature=temperature, seed=0, logprobs=0)
            await llm.reset_prefix_cache()
        except BaseException as error:  # a cancelled start leaves no process behind either
            if core is not None:
                core.stop()
            if isinstance(error, LibraError) or not isinstance(error, Exception):
                raise
            # The boundary to vLLM: configuration, memory, an unsupported model or head size.
            raise ModelError(
                f"{settings.model_dir}: vLLM cannot serve this ({type(error).__name__}: {error}); its process's messages are in "
                "this worker's log, more with VLLM_LOGGING_LEVEL=INFO"
            ) from error
        core.steps = core.generated_tokens = 0
        return core

    # -- requests ----------------------------------------------------------------------------------------------------

    async def serve(self, job: VLLMJob, now: Any) -> TurnOutput:
        """One request to its end; ``now`` is the clock."""
        request = job.request
        prompt: dict[str, Any] = {"prompt_token_ids": request.context_ids.tolist()}
        if self.settings.keep_kv:
            prompt["cache_salt"] = f"version {job.version}"
        with _errors(job.name):
            final = None
            sampling = _sampling(
                max_tokens=request.max_new_tokens,
                temperature=request.temperature,
                top_p=request.top_p,
                seed=request.seed,
                stop_token_ids=list(request.stop_ids),
                logprobs=0,
                extra_args={GENERATED: request.generated} if request.generated else None,
            )
            priority = packed_priority(request.priority)
            async for output in self.llm.generate(prompt, sampling, job.handle, priority=priority):
                final = output
        assert final is not None and final.finished, f"{job.name}: vLLM ended a request without a final output"
        return self._output(job, final, now())

    async def abort(self, job: VLLMJob) -> None:
        """End a request with the tokens it has."""
        with _errors(job.name):
            await self.llm.abort(job.handle)

    def _output(self, job: VLLMJob, final: Any, now_s: float) -> TurnOutput:
        completion = final.outputs[0]
        token_ids = np.asarray(completion.token_ids, np.int32)
        logprobs = np.asarray(completion.logprobs.logprobs if len(token_ids) else [], np.float32)
        if len(logprobs) != len(token_ids) or not np.isfinite(logprobs).all():
            raise EngineError(f"{job.name}: log-probabilities are missing or not finite; the weights may be broken")
        versions = np.full(len(token_ids), job.version, np.int32)
        for span in completion.weight_versions or ():
            versions[span.start : span.end] = int(span.version)
        # With keep_kv the oldest KV attended to is from the request's start, even if vLLM recomputed some.
        kv_versions = np.full_like(versions, job.version) if self.settings.keep_kv else versions.copy()
        reasons = {"stop": StopReason.STOP, "length": StopReason.LENGTH, "abort": StopReason.ABORT}
        if completion.finish_reason not in reasons:
            raise EngineError(f"{job.name}: vLLM ended the request with {completion.finish_reason!r}")
        started_s = job.started_s if job.started_s is not None else now_s
        return TurnOutput(
            token_ids=token_ids,
            logprobs=logprobs,
            weight_versions=versions,
            kv_versions=kv_versions,
            stop_reason=reasons[completion.finish_reason],
            cached_tokens=max(int(final.num_cached_tokens or 0), 0),
            queued_s=started_s - job.arrived_s,
            busy_s=now_s - started_s,
        )

    # -- weights -----------------------------------------------------------------------------------------------------

    async def pause(self) -> None:
        """Stop between two steps; running requests keep their place."""
        self.passes.stood()
        with _errors("pause"):
            await self.llm.pause_generation(mode="keep", clear_cache=False)

    async def resume(self) -> None:
        """Continue after ``pause``."""
        self.passes.stood()
        with _errors("resume"):
            await self.llm.resume_generation()

    async def load(self, version: int, path: Path, tied_to: str | None) -> None:
        """Load weights into the paused engine, drop KV unless ``keep_kv``, label later steps."""
        with _errors(f"loading {path}"):
            await self.llm.collective_rpc("libra_load", args=(str(path), tied_to))
            if not self.settings.keep_kv and not await self.llm.reset_prefix_cache(True, True):  # a connector's, too
                raise EngineError(f"version {version}: KV of the weights before it could not be dropped")
            await self.llm.update_weight_version(str(version))

    # -- probes ------------------------------------------------------------------------------------------------------

    async def score(self, token_ids: NDArray[np.int32]) -> NDArray[np.float32]:
        """See RolloutEngine; without cached KV, also while paused."""
        with _errors("score"):
            final = await self._generate([int(token) for token in token_ids], 1, prompt_logprobs=0)
        found = np.asarray(final.prompt_logprobs.logprobs, np.float32)
        assert len(found) == len(token_ids) - 1, f"{len(found)} log-probabilities of {len(token_ids)} tokens"
        return found

    async def project(self, seed: int) -> dict[str, tuple[float, ...]]:
        """See RolloutEngine; as all ranks together compute the layers."""
        found = {}
        for name, (rows, inputs) in (await self._outputs(seed, None)).items():
            generator, table = generator_of(seed, name), is_embedding(name)
            (draw_rows if table else draw_input)(generator, inputs)
            found[name] = numbers_of(generator, torch.from_numpy(rows if table else rows[0]))
        return found

    async def columns(self, wanted: Mapping[str, tuple[int, ...]]) -> dict[str, NDArray[np.float32]]:
        found = await self._outputs(None, {name: [int(i) for i in places] for name, places in wanted.items()})
        unknown = sorted(set(wanted) - set(found))
        if unknown:
            raise EngineError(f"columns: this model has no {unknown[0]}; it has {', '.join(list(found)[:4])}, ...")
        return {name: rows.astype(np.float32) for name, (rows, _) in found.items()}

    async def _outputs(
        self, seed: int | None, wanted: Mapping[str, Sequence[int]] | None
    ) -> dict[str, tuple[NDArray[np.float64], int]]:
        with _errors("project"):
            ranks = await self.llm.collective_rpc("libra_outputs", args=(seed, wanted))
        found: dict[str, tuple[NDArray[np.float64], int]] = {}
        for parts in ranks:
            for name, given in parts.items():
                part = Part(*given)
                if name not in found:
                    found[name] = np.zeros((part.num_rows, part.whole)), part.inputs
                rows = np.frombuffer(part.data, np.float32).reshape(part.num_rows, part.num_here)
                found[name][0][:, part.offset : part.offset + part.num_here] += rows
        return found

    async def _generate(self, ids: list[int], new: int, **sampling: Any) -> Any:
        self._probes += 1
        steps, tokens = self.steps, self.generated_tokens
        final = None
        prompt = {"prompt_token_ids": ids, "cache_salt": f"probe {self._probes}"}
        sampled = _sampling(**{"max_tokens": new, "temperature": 0.0} | sampling)
        async for output in self.llm.generate(prompt, sampled, f"{PROBE_ID}{self._probes}", priority=PROBE):
            final = output
        if self.generated_tokens - tokens == new:  # no request was served meanwhile
            self.steps, self.generated_tokens = steps, tokens
        return final

    @property
    def kv_tokens(self) -> int:
        """KV capacity of the process in tokens, on all ranks together."""
        cache = self.llm.vllm_config.cache_config
        return int(cache.kv_cache_size_tokens or cache.num_gpu_blocks * cache.block_size)

    # -- end ---------------------------------------------------------------------------------------------------------

    @property
    def dead(self) -> bool:
        """Whether the process has died."""
        return bool(self.llm.errored)

    @property
    def process_ids(self) -> list[int]:
        """Processes of the engine on this machine, the scheduling one first."""
        manager = self.llm.engine_core.resources.engine_manager
        return [process.pid for process in manager.processes] if manager is not None else []

    def stop(self) -> None:
        """End the process, and remove memory shared with its ranks; also after it died."""
        memory = set[Path]()
        with contextlib.suppress(Exception):  # a dead engine may raise anything
            memory = _shared_memory(self.process_ids)
        with contextlib.suppress(Exception):
            self.llm.shutdown(timeout=SHUTDOWN_S if torch.cuda.is_available() else 0.0)
        for file in memory:
            file.unlink(missing_ok=True)

    def _count_steps(self) -> None:
        client = self.llm.engine_core
        receive = client.get_output_async

        async def counted() -> Any:
            outputs = await receive()
            if outputs.outputs:
                self.steps += 1
                self.generated_tokens += sum(len(each.new_token_ids) for each in outputs.outputs)
                self.passes.saw(outputs)
            return outputs

        client.get_output_async = counted


def _shared_memory(process_ids: Iterable[int]) -> set[Path]:
    import psutil  # vLLM needs it, too

    own, found = {each.path for each in psutil.Process().memory_maps()}, set[Path]()
    for process in map(psutil.Process, process_ids):
        for each in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.Error):  # the process has ended
                found |= {Path(mapped.path) for mapped in each.memory_maps() if mapped.path not in own}
    return {file for file in found if str(file).startswith(("/dev/shm/psm_", "/dev/shm/vllm_dist_"))}


class PassWatch:
    """Seconds of passes, from the time stamps of an engine process's messages. While the process
    has requests, the time between two messages is one pass. A pass after idle time or a pause, or
    with a probe, does not count."""

    def __init__(self, meter: PassMeter) -> None:
        self.meter = meter
        self._tokens: dict[str, int] = {}  # of context, of each running request
        self._last_s: float | None = None

    def stood(self) -> None:
        """Note a pause or idle time: the time until the next message is not a pass."""
        self._last_s = None

    def saw(self, outputs: Any) -> None:
        """Count the outputs of a pass (``EngineCoreOutputs`` of vLLM)."""
        prefilled, context, probed = 0, 0, False
        for each in outputs.outputs:
            name, stats = each.request_id, each.prefill_stats
            if stats is not None:
                prefilled += stats.num_computed_tokens
                self._tokens[name] = stats.num_prompt_tokens
                probed |= name.startswith(PROBE_ID)
            context += self._tokens.get(name, 0)
            if each.finish_reason is not None:
                self._tokens.pop(name, None)
            elif name in self._tokens:
                self._tokens[name] += len(each.new_token_ids)
        for name in outputs.finished_requests or ():  # aborted
            self._tokens.pop(name, None)
        if self._last_s is not None and not probed:
            self.meter.add(len(outputs.outputs), context, prefilled, outputs.timestamp - self._last_s)
        self._last_s = outputs.timestamp if self._tokens else None


def _sampling(**given: Any) -> Any:
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    fixed = {"ignore_eos": True, "detokenize": False, "flat_logprobs": True, "skip_clone": True}
    return SamplingParams(**given, **fixed, output_kind=RequestOutputKind.FINAL_ONLY)


@contextlib.contextmanager
def _errors(what: str) -> Iterator[None]:
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        yield
    except (asyncio.CancelledError, LibraError):
        raise
    except EngineDeadError as error:
        raise EngineGone(f"{what}: the vLLM engine process died") from error
    except Exception as error:  # the boundary to vLLM
        raise EngineError(f"{what}: vLLM failed ({type(error).__name__}: {error})") from error
