"""Every setting of a run, as frozen pydantic models: one class per section, and `RunSections` with all of them.

The docstring under a field is its documentation: meaning, unit, effect, and what None means. ``docs/configuration.md`` and
``libra config --fields`` are made from it. Values are checked strictly: ``"3"`` is not a whole number, ``1`` is not a truth
value, ``nan`` is not a number.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from libra.config.agent import AgentSection
from libra.config.distil import DistilSection
from libra.config.own_parts import OwnOr, OwnPart
from libra.config.planner import PlannerSection
from libra.config.section import AtLeastOne, AtLeastZero, Section, VariableNames
from libra.config.services import ServicesSection
from libra.config.simulation import POLICIES, SimulationSection
from libra.config.slurm import SlurmRolloutJobs, SlurmSection, SlurmToolJobs, SlurmTrainJobs
from libra.config.staleness import StalenessSection, with_both
from libra.config.trainer import TrainerSection
from libra.keys import check_run_name


class RunSection(Section):
    """The run as a whole: its directory, its length, and how stale its data may be."""

    name: str | None = None
    """Name of the run: 1-63 letters, digits, '_' or '.', beginning with a letter or digit. None: the name
    of the configuration file and the time of the start."""
    dir: Annotated[Path, Field(strict=False)] = Path("runs")
    """Directory that holds runs; this one is written to `dir`/`name`, which must not hold a run yet."""
    seed: AtLeastZero = 0
    """Seed of all randomness: prompts, sampling, tools. The same seed draws the same prompts."""
    iterations: AtLeastOne = 50
    """Iterations (optimizer batches) to run."""
    eta: AtLeastZero = 0
    """Staleness bound, in weight versions: how far behind the newest weights a consumed token may be. 0: synchronous. Section
    `staleness` has what belongs to it."""
    from_checkpoint: Annotated[Path, Field(strict=False)] | None = None
    """Checkpoint whose weights become version 0 and whose optimizer state is continued (`libra run --from`); steps count from 0.
    A Hugging Face directory without trainer.json gives its weights only. `model.path` stays the reference of `kl_coef` and
    must have the same architecture. None: start from `model.path`."""

    @field_validator("name")
    @classmethod
    def _name_fits_a_key(cls, name: str | None) -> str | None:
        return name if name is None else check_run_name(name)


class ModelSection(Section):
    """The language model to train."""

    path: Annotated[str, Field(min_length=1)] = "libra/tiny-arithmetic"
    """A Hugging Face id ("org/name"), a directory in Hugging Face layout, a model that ships with Libra ("libra/name"), or one that
    workflows/prepare_model.py writes ("smollm2-135m")."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of the weights in engines and trainer."""
    master_dtype: Literal["float32"] | None = "float32"
    """Number format of the weights that the optimizer updates, and of its moments; the model in training and the published
    weights are these, rounded to `dtype`. None: `dtype`; with bfloat16, learning rates below 1e-4 then lose most updates."""
    loader: OwnPart | None = None
    """A `libra.model_loader.ModelLoader` of your own, which builds model and tokenizer from the directory, for trainer and
    transformers engines. None: transformers builds them."""


class EnvironmentSection(Section):
    """The environment: it gives prompts, runs tools and grades answers."""

    name: Annotated[str, Field(min_length=1)] = "tool_arithmetic"
    """A registered environment, or "module:attribute" for one of your own."""
    args: dict[str, Any] = {}
    """Keyword arguments of its constructor. A file or a command line that changes `name` starts from empty `args`."""
    quotas: dict[str, str | int] = {}
    """Limits that tools name with `quota`, over all workers, e.g. `{search: 10/s}`: calls per s, min or h, or, as a bare number,
    calls at once. Calls beyond it wait."""
    retries: AtLeastZero = 5
    """Times that a tool, a reward or a service is tried again after its API has refused a call with HTTP 429 or
    `libra.errors.RateLimited`. Each wait is twice as long as the one before, and at least as long as the API says (Retry-After)."""
    retry_s: Annotated[float, Field(gt=0)] = 1.0
    """Seconds before the first of these; a random part of up to a half is taken off each wait."""
    tools: dict[Literal["mcp"], Annotated[str, Field(min_length=1)]] = {}
    """Tool servers, whose tools come beside the environment's own: `{mcp: COMMAND}` starts COMMAND once on each worker and speaks
    MCP on its standard input and output."""
    tools_env: VariableNames = ()
    """Names of environment variables that tool servers are given beside those that they always have (docs/security.md), e.g.
    `[SEARCH_API_KEY]`. Each must be set where workers run, and where the run is started."""


class RolloutSection(Section):
    """How trajectories are generated."""

    engine: Annotated[str, OwnOr(("transformers", "vllm"))] = "transformers"
    """Inference engine of a rollout worker: transformers in the worker's own process, vLLM in its own processes (`make
    setup-vllm`), configured by section `vllm`, or a `libra.rollout.engine.EngineFactory` of your own."""
    tp: AtLeastOne = 1
    """Tensor-parallel degree of an engine (vllm, or one of your own that declares it). The resource TP of a worker, or an
    entry of `cluster.engines`, overrides it."""
    keep_kv: bool = False
    """Keep the KV cache of the older weights when weights change while requests run (vllm). This costs no time; tokens
    generated afterwards attend to stale KV, and each is recorded with its KV's version. false: running requests
    recompute their context."""
    slots: AtLeastOne = 64
    """Concurrent generations of one engine."""
    kv_cache_gib: Annotated[float, Field(gt=0)] | None = None
    """KV cache of one engine, in GiB (transformers; for vllm see `vllm.kv_cache_gib`). If it is smaller than all slots
    need at `max_context_tokens`, turns wait until their context fits, and contexts kept between turns are evicted.
    None: enough for all slots."""
    kv_host_gib: Annotated[float, Field(gt=0)] | None = None
    """Host memory of one engine, in GiB, for the KV of trajectories between two turns. Contexts that were evicted from the KV cache
    return from there, and a trajectory that changes its home takes its KV along where that is expected to be quicker than computing
    it again. Never used across versions; all engines of a machine together may not have more than its memory. Needs engine
    transformers; for vllm see `vllm.kv_transfer_config`. None: KV is computed again."""
    tool_format: Literal["hermes", "qwen3_coder"] | None = None
    """How the model writes tool calls: "hermes" (JSON; Hermes, Qwen2.5, Qwen3) or "qwen3_coder" (XML; Qwen3-Coder, Qwen3.5). None:
    the environment's own format, by default "hermes"."""
    max_new_tokens: AtLeastOne = 64
    """Maximum tokens of one turn; a turn that reaches it ends its trajectory as "length"."""
    chunk_tokens: AtLeastOne | None = None
    """Maximum tokens of one quantum: a longer turn parks after so many, and waits in the queue for a slot to go on, with the same
    tokens as in one piece. So long turns neither hold a slot while others wait for it, nor stay on an engine that others have left;
    each part costs a record and a report. An engine of your own must declare ``continues_turns``. None: a turn is one quantum."""
    max_turns: AtLeastOne = 12
    """Maximum turns of a trajectory."""
    max_context_tokens: AtLeastOne = 1024
    """Maximum tokens of a trajectory: prompt, generations and observations together."""
    temperature: Annotated[float, Field(ge=0)] = 1.0
    """Sampling temperature; 1 is the model's own distribution, 0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Probability mass that sampling keeps (nucleus); 1 keeps everything."""
    ignore_eos: bool = False
    """Every turn generates exactly `max_new_tokens` tokens, and end-of-text tokens are ignored. For benchmarks."""
    speculate: bool = False
    """Draft tokens from the other samples of a group while few sequences generate, as many as pay off by measurement. A drafted
    token is kept where it equals the one sampled, so the tokens are the same. Needs engine transformers; for vllm see
    `vllm.speculative_config`."""
    exact_logprobs: bool = False
    """Record the log-probability of each generation scored alone and uncached, as the trainer scores it. The mismatch figures
    are then exactly 0 for equal weights. Costs a forward pass of the whole context per turn, in the engine and in the trainer.
    Needs engine transformers, top_p 1 and a temperature above 0."""


class VLLMSection(Section):
    """Settings of `rollout.engine` vllm."""

    kv_cache_gib: Annotated[float, Field(gt=0)] | None = None
    """KV cache per tensor-parallel rank, in GiB. None: on a CPU what `rollout.slots` requests of
    `rollout.max_context_tokens` need; on a GPU what `gpu_memory_frac` leaves. If it is smaller than all slots need,
    late requests are preempted and recomputed."""
    gpu_memory_frac: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of a GPU's memory that an engine takes for weights and KV cache."""
    eager: bool | None = None
    """Run the model uncompiled. false: compile it and capture CUDA graphs; the engine starts minutes later and runs
    faster. None: true on a CPU, false on a GPU."""
    kv_transfer_config: dict[str, Any] = {}
    """vLLM's argument of this name: a KV connector that keeps evicted KV, e.g. `{kv_connector: OffloadingConnector,
    kv_connector_extra_config: {cpu_bytes_to_use: 8000000000}}`. It must be able to drop the KV of older weights. `kv_role` is
    kv_both unless given. Empty: none."""
    speculative_config: dict[str, Any] = {}
    """vLLM's argument of this name, on GPUs: how it drafts tokens, e.g. `{method: ngram, num_speculative_tokens: 4,
    prompt_lookup_max: 4}`, or `method: suffix` (pip install arctic-inference). Tokens follow the same distribution, but need not be
    those without drafts. Empty: none."""


class CheckpointSection(Section):
    """Checkpoints to start from: Hugging Face layout with the optimizer's state, in RUN/checkpoints."""

    every: AtLeastZero | None = None
    """Steps between checkpoints; the last step always writes one. 0: only the last. None: at each evaluation
    (`evaluation.every`), or every 10 steps without evaluations. A checkpoint holds the weights and twice as much optimizer
    state; the trainer's memory holds a copy of it while it is written."""
    keep: AtLeastOne = 2
    """Newest checkpoints to keep, beside the best."""
    keep_best: bool = True
    """Also keep the best one, and link it as `checkpoints/best`: by mean reward on the held-out questions with
    `evaluation.every`, else by the mean training reward of the iteration."""


class EvaluationSection(Section):
    """Held-out questions, answered with the sampling settings of training."""

    prompts: AtLeastZero = 0
    """Held-out questions before the first and after the last step. 0: no evaluation."""
    every: AtLeastZero = 0
    """Evaluate also after every n-th iteration. 0: only first and last."""
    temperature: Annotated[float, Field(ge=0)] | None = None
    """Sampling temperature of the evaluation. None: that of `rollout`."""


class PolicySection(Section):
    """Which waiting trajectory gets the next free slot, and where."""

    name: Annotated[str, OwnOr(POLICIES)] = "cmlfq"
    """cmlfq: by forecasts of remaining tokens, learned from what tools return; without measured skill, least attained service
    first. fifo: first come, first served. mlfq: least attained service first. docs/scheduling.md compares them. Your
    own: `libra.policy.Ordering`."""
    objective: Literal["makespan", "stream"] = "makespan"
    """For cmlfq. makespan: longest forecast first, so that the iteration ends soon. stream: complete one group after
    the other, so that a step can begin while other groups generate (`run.eta` of 1 or more)."""
    patience: AtLeastOne = 200_000
    """Starvation bound, counted in parkings (a trajectory begins to wait for a slot). A trajectory is served next after
    this many further parkings for its kind of slot, plus one for each trajectory that already waited when it parked.
    The default equals five thousand trajectories of forty turns. With a small number every trajectory is overdue, and
    the order is first come, first served. Not for fifo; for a policy of your own if it takes it."""
    boundaries_tokens: dict[Literal["tp1", "tp2", "tp4", "tp8"], Annotated[float, Field(gt=0)]] = {}
    """For cmlfq: generated tokens up to which a trajectory begins on engines of a tensor-parallel degree, e.g. {"tp1":
    3000, "tp2": 12000}; longer ones begin on higher degrees. `libra plan` prints these boundaries of its buckets. They
    are followed if a slot is free there and no other engine would finish a quarter sooner. Empty: load alone
    decides."""


class EngineGroup(Section):
    """Rollout workers of one kind: one bucket."""

    tp: AtLeastOne = 1
    """Tensor-parallel degree of their engines."""
    threads: AtLeastOne | None = None
    """Torch threads per engine, or per tensor-parallel rank. None: `cluster.threads`."""
    slots: AtLeastOne | None = None
    """Concurrent generations of one of them. None: `rollout.slots`."""
    count: AtLeastOne = 1
    """Number of such workers."""
    min_pass_s: Annotated[float, Field(gt=0)] | None = None
    """Minimum seconds of a forward pass (transformers); a faster pass waits. It emulates engines of different speeds on
    one machine, for measurements and tests. None: no minimum."""


class ClusterSection(Section):
    """The Dask cluster: a running one, or local processes."""

    scheduler: Annotated[str, Field(min_length=1)] | None = None
    """Address of a running Dask scheduler, as tls://HOST:PORT, or the cluster.json that `libra cluster slurm` wrote. None: the
    run starts a local cluster of processes."""
    rollout_workers: AtLeastOne = 1
    """Rollout workers of a local cluster or of `libra cluster slurm`, one engine each. A given scheduler has its own workers."""
    engines: Annotated[tuple[EngineGroup, ...], Field(strict=False)] = ()
    """Rollout workers of several kinds instead, e.g. `[{tp: 1, count: 2}, {tp: 2, threads: 1, slots: 128}]`: each entry is a
    bucket, and on Slurm a kind of job. A given scheduler must have exactly these. Empty: `rollout_workers` of one kind, with
    `rollout.tp`; with a given scheduler, the engines it has."""
    train_workers: AtLeastOne = 1
    """Core training replicas, one process each, which take every step together as one group. A given scheduler must have as many
    workers with TRAIN=1."""
    hybrid_workers: Annotated[int, Field(ge=0)] = 0
    """Rollout workers, counted from the first, that can change roles during the run: train beside the core replicas, or lend
    their GPUs. A given scheduler must have as many with HYBRID=1. 0: no worker changes its role."""
    drain_timeout_s: Annotated[float, Field(gt=0)] | None = None
    """Drain time of a role change, in seconds: running generations of the worker may finish. Then it aborts them, and
    other workers generate those turns again. None: no limit."""
    tool_workers: AtLeastOne = 1
    """Workers that run tools and graders, of a local cluster or of `libra cluster slurm`. A given scheduler has its own."""
    tool_workers_most: AtLeastOne | None = None
    """Tool workers that there may be: where actions wait for long, more than `tool_workers` are started, on this machine or as jobs
    of Slurm, and where they idle those are ended (docs/tools.md). Not with sessions or an agent. None: `tool_workers`, always."""
    tool_slots: AtLeastOne = 64
    """Concurrent actions of one tool worker."""
    tool_cores: AtLeastOne | None = None
    """Cores of one tool worker for tools that declare `cores`, which hold them alone. None: those of its machine, which tool
    workers of a local cluster share evenly."""
    tool_memory_gib: Annotated[float, Field(gt=0)] | None = None
    """Memory of one tool worker for tools that declare `memory_gib`. None: that of its machine, shared alike."""
    tool_gpus: Annotated[int, Field(ge=0)] = 0
    """GPUs of one tool worker for tools that declare `gpu`."""
    threads: AtLeastOne | None = None
    """Torch threads per worker. None: the number of cores."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where training replicas and transformers engines compute. auto: on the first GPU that the worker sees (CUDA_VISIBLE_DEVICES),
    else on the CPU. cuda: an error if a worker sees none. vLLM engines compute on what their installation is for."""
    dashboard_port: Annotated[int, Field(ge=0, le=65535)] = 8787
    """Port of Dask's dashboard with the Libra page. 0, or if this one is taken: any free port, which the run
    prints."""
    dashboard_names: Annotated[
        tuple[Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$")], ...], Field(strict=False)
    ] = ()
    """Further names under which a browser may open the dashboard of a local cluster or of `libra cluster slurm`, e.g.
    `[gateway.example]` of a proxy. IP addresses, localhost and the machine's own names always work; other web pages are
    refused. With `--scheduler`: the setting `libra.dashboard-names` of that scheduler's Dask."""


class ObserveSection(Section):
    """What a run displays and records besides the trajectories."""

    tensorboard: bool = True
    """Write metrics, settings and sample texts for TensorBoard into the run directory."""
    trackers: Annotated[tuple[Annotated[str, OwnOr(("wandb",))], ...], Field(strict=False)] = ()
    """Further trackers that get the same: `wandb` (`pip install wandb`; it uploads only with WANDB_MODE=online), or
    `module:Class`, such as `examples.trackers:MLflow` in a checkout (`libra.observe.metrics.Tracker`)."""
    event_log: bool = True
    """Write every scheduling event and decision to events.jsonl; its older lines are kept compressed in events/."""
    progress: bool = True
    """Show live progress in the terminal."""
    on_iteration: OwnPart | None = None
    """Function of your own that the driver calls with the numbers of each iteration (`libra.driver.callbacks`). None: none."""
    on_batch: OwnPart | None = None
    """Function of your own that the driver calls with the trajectories of each batch after its step. None: none."""
    on_evaluation: OwnPart | None = None
    """Function of your own that the driver calls with the result of each evaluation. None: none."""


class StoreSection(Section):
    """What stays on disk."""

    keep_versions: AtLeastOne = 3
    """Weight versions kept on disk besides those in use."""
    keep_journals: bool = False
    """Keep the per-quantum records of trajectories after their group is committed."""


class WeightsSection(Section):
    """How engines get new weights."""

    transfer: Literal["shared", "peer"] = "shared"
    """"shared": engines read the run directory. "peer": each rollout worker fetches a version over the network from the nearest
    worker that has it, into its own directory; for workers that cannot read the run directory."""


class WatchdogSection(Section):
    """What happens when a run makes no progress: no quantum, group, step or other task finishes."""

    timeout_s: Annotated[float, Field(ge=1)] | Literal["auto"] | None = "auto"
    """Seconds without progress after which the watchdog names the stalled task, worker and stage, and writes the worker's stacks to
    `stacks/` in the run directory. "auto": 10 times what tasks of the stalled kind usually take in this run, at least 60 s and at
    least the time-outs of its tools and graders; 600 s for a kind that was not seen three times yet. A number is the limit for
    all kinds; set it above the longest optimizer step or tool call. None: no watchdog."""
    restart: bool = False
    """Restart the stalled worker. Committed quanta of its trajectories are kept; the quantum in flight runs again."""


class RunSections(Section):
    """Every section of one run; `libra.config.RunConfig` is this with the checks across sections."""

    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    environment: EnvironmentSection = EnvironmentSection()
    agent: AgentSection = AgentSection()
    rollout: RolloutSection = RolloutSection()
    vllm: VLLMSection = VLLMSection()
    trainer: TrainerSection = TrainerSection()
    staleness: StalenessSection = StalenessSection()
    distil: DistilSection = DistilSection()
    services: ServicesSection = ServicesSection()
    checkpoint: CheckpointSection = CheckpointSection()
    evaluation: EvaluationSection = EvaluationSection()
    policy: PolicySection = PolicySection()
    cluster: ClusterSection = ClusterSection()
    observe: ObserveSection = ObserveSection()
    store: StoreSection = StoreSection()
    weights: WeightsSection = WeightsSection()
    watchdog: WatchdogSection = WatchdogSection()
    slurm: SlurmSection = SlurmSection()
    slurm_rollout: SlurmRolloutJobs = SlurmRolloutJobs()
    slurm_train: SlurmTrainJobs = SlurmTrainJobs()
    slurm_tool: SlurmToolJobs = SlurmToolJobs()
    simulation: SimulationSection = SimulationSection()
    planner: PlannerSection = PlannerSection()

    @model_validator(mode="before")
    @classmethod
    def _one_bound(cls, given: Any) -> Any:
        """`run.eta` and `staleness.eta` are one setting."""
        return with_both(given) if isinstance(given, Mapping) else given
