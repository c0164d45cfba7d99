"""Every setting of a run, as frozen pydantic models; `RunSections` has all sections.

The docstring under a field is its documentation: meaning, unit, effect, and the meaning of None.
``docs/configuration.md`` and ``libra config --fields`` are made from it. Values are checked
strictly: ``"3"`` is not an integer, ``1`` is not a boolean, ``nan`` is not a number.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from libra.config.planner import PlannerSection, SimulationSection
from libra.config.section import AtLeastOne, AtLeastZero, OwnOr, OwnPart, Section
from libra.config.task_sections import (
    AgentSection,
    CheckpointSection,
    DistilSection,
    EnvironmentSection,
    EvaluationSection,
    ModelSection,
    PolicySection,
    RunSection,
    ServicesSection,
    StalenessSection,
)
from libra.config.trainer import TrainerSection
from libra.errors import EngineError, pip_install


class RolloutSection(Section):
    """Generation of trajectories."""

    engine: Annotated[str, OwnOr(("transformers", "vllm"))] = "transformers"
    """Inference engine of a rollout worker: transformers in the worker's own process, vLLM in its
    own processes (`make setup-vllm`), with `engine_args`, or a `libra.rollout.engine.EngineFactory`
    of your own."""
    tp: AtLeastOne = 1
    """Tensor-parallel degree of an engine (vllm, or one of your own that declares it). The resource
    TP of a worker, or an entry of `cluster.engines`, overrides it."""
    keep_kv: bool = False
    """Keep the KV cache of the older weights when weights change while requests run (vllm). Running
    requests then lose no time; their later tokens attend to stale KV, and each token is recorded
    with the version of its KV. false: running requests recompute their context."""
    slots: AtLeastOne = 64
    """Concurrent generations of one engine."""
    engine_args: dict[str, Any] = {}
    """For vllm: arguments of its `AsyncEngineArgs`, by its names, e.g. `{gpu_memory_utilization:
    0.9, enforce_eager: true}`; a `kv_transfer_config` with a connector that keeps evicted KV and
    can drop the KV of older weights; on GPUs a `speculative_config` that drafts tokens. Arguments
    that Libra sets itself are refused."""
    kv_cache_gib: Annotated[float, Field(gt=0)] | None = None
    """KV cache of one engine, in GiB; with vllm of each tensor-parallel rank. If it is smaller than
    all slots need at `max_context_tokens`, turns wait until their context fits (vllm: late requests
    are preempted and recomputed), and contexts kept between turns are evicted. If null, enough for all
    slots; with vllm on a GPU what `gpu_memory_utilization` leaves."""
    kv_host_gib: Annotated[float, Field(gt=0)] | None = None
    """Host memory of one engine, in GiB, for the KV of trajectories between two turns. Evicted
    contexts return from there, and a trajectory that moves to another engine takes its KV along
    where a transfer is expected to be quicker than a recomputation. KV is never used across
    versions, and all engines of a machine together may not exceed its memory. Needs engine
    transformers; for vllm see `engine_args`. If null, KV is computed again."""
    tool_format: Literal["hermes", "qwen3_coder"] | None = None
    """Format in which the model writes tool calls: "hermes" (JSON; Hermes, Qwen2.5, Qwen3) or "qwen3_coder"
    (XML; Qwen3-Coder, Qwen3.5). If null, the environment's own format, by default "hermes"."""
    max_new_tokens: AtLeastOne = 64
    """Maximum tokens of one turn; a turn that reaches it ends its trajectory as "length"."""
    chunk_tokens: AtLeastOne | None = None
    """Maximum tokens of one quantum: a longer turn parks after so many and waits in the queue for a
    slot; its tokens are the same as in one piece. Long turns then do not hold a slot while others
    wait, and can leave a busy engine; each part costs a record and a report. An engine of your own
    must declare ``continues_turns``. If null, a turn is one quantum."""
    max_turns: AtLeastOne = 12
    """Maximum turns of a trajectory."""
    max_context_tokens: AtLeastOne = 1024
    """Maximum tokens of a trajectory: prompt, generations and observations together."""
    temperature: Annotated[float, Field(ge=0)] = 1.0
    """Sampling temperature; 1 is the model's own distribution, 0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Probability mass that sampling keeps (nucleus); 1 keeps everything."""
    ignore_eos: bool = False
    """Every turn generates exactly `max_new_tokens` tokens, and end-of-text tokens are ignored. For
    benchmarks."""
    speculate: bool = False
    """Draft tokens from the other samples of a group while few sequences generate, as many as pay
    off by measurement. A drafted token is kept where it equals the sampled one, so the tokens do
    not change. Needs engine transformers; for vllm see `engine_args`."""
    exact_logprobs: bool = False
    """Score each generation once more, alone and uncached, as the trainer scores it, and record
    those log-probabilities. The mismatch figures are then exactly 0 for equal weights. Costs a
    forward pass of the whole context per turn, in the engine and in the trainer. Needs engine
    transformers, top_p 1 and a temperature above 0."""


class EngineGroup(Section):
    """Rollout workers of one kind: one bucket."""

    tp: AtLeastOne = 1
    """Tensor-parallel degree of their engines."""
    threads: AtLeastOne | None = None
    """Torch threads per engine, or per tensor-parallel rank. If null, `cluster.threads`."""
    slots: AtLeastOne | None = None
    """Concurrent generations of one of them. If null, `rollout.slots`."""
    count: AtLeastOne = 1
    """Number of such workers."""
    min_pass_s: Annotated[float, Field(gt=0)] | None = None
    """Minimum seconds of a forward pass (transformers); a faster pass waits. It emulates engines of
    different speeds on one machine, for measurements and tests. If null, no minimum."""


class ClusterSection(Section):
    """The Dask cluster: a running one, or local processes."""

    scheduler: Annotated[str, Field(min_length=1)] | None = None
    """Address of a running Dask scheduler, as tls://HOST:PORT, or the cluster.json that `libra
    cluster slurm` wrote. If null, the run starts a local cluster of processes."""
    rollout_workers: AtLeastOne = 1
    """Rollout workers of a local cluster or of `libra cluster slurm`, one engine each. A given
    scheduler has its own workers."""
    engines: Annotated[tuple[EngineGroup, ...], Field(strict=False)] = ()
    """Rollout workers of several kinds instead, e.g. `[{tp: 1, count: 2}, {tp: 2, threads: 1,
    slots: 128}]`: each entry is a bucket, and on Slurm a kind of job. A given scheduler must have
    exactly these. Empty: `rollout_workers` of one kind, with `rollout.tp`; with a given scheduler,
    the engines it has."""
    train_workers: AtLeastOne = 1
    """Core training replicas, one process each, which take every step together as one group. A
    given scheduler must have as many workers with TRAIN=1."""
    hybrid_workers: Annotated[int, Field(ge=0)] = 0
    """Rollout workers, counted from the first, that can change roles during the run: train beside
    the core replicas, or lend their GPUs. A given scheduler must have as many with HYBRID=1. 0: no
    worker changes its role."""
    drain_timeout_s: Annotated[float, Field(gt=0)] | None = None
    """Longest time, in seconds, for which a role change waits for the worker's running generations.
    Then they are aborted, and other workers generate those turns again. If null, no limit."""
    tool_workers: AtLeastOne = 1
    """Workers that run tools and graders, of a local cluster or of `libra cluster slurm`. A given
    scheduler has its own."""
    tool_workers_most: AtLeastOne | None = None
    """Upper limit of tool workers: more than `tool_workers` are started while actions wait for
    long, on this machine or as jobs of Slurm, and ended when they idle (docs/tools.md). Not with
    sessions or an agent. If null, always `tool_workers`."""
    tool_slots: AtLeastOne = 64
    """Concurrent actions of one tool worker."""
    tool_supply: dict[Literal["cores", "memory_gib", "gpus"], AtLeastOne] = {}
    """Resources of one tool worker for tools that declare `cores`, `memory_gib` or `gpu`, e.g. `{cores:
    8, gpus: 1}`. Without cores and memory: its machine's, which tool workers of a local
    cluster share evenly; without GPUs: none."""
    threads: AtLeastOne | None = None
    """Torch threads per worker. If null, the number of cores."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of training replicas and transformers engines. auto: the first GPU that the worker
    sees (CUDA_VISIBLE_DEVICES), else the CPU. cuda: an error if a worker sees none. vLLM engines
    use the device that their installation is for."""
    dashboard_port: Annotated[int, Field(ge=0, le=65535)] = 8787
    """Port of Dask's dashboard with the Libra page. 0, or a port that is taken: any free port,
    which the run prints."""
    dashboard_names: Annotated[
        tuple[Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$")], ...], Field(strict=False)
    ] = ()
    """Further names under which a browser may open the dashboard of a local cluster or of `libra
    cluster slurm`, e.g. `[gateway.example]` of a proxy. IP addresses, localhost and the machine's
    own names always work; other web pages are refused. With `--scheduler`: the setting
    `libra.dashboard-names` of that scheduler's Dask."""


class ObserveSection(Section):
    """Displays and records of a run besides its trajectories."""

    trackers: Annotated[tuple[Annotated[str, OwnOr(("tensorboard", "wandb"))], ...], Field(strict=False)] = (
        "tensorboard",
    )
    """Experiment trackers that get metrics, settings and sample texts: `tensorboard`, `wandb`
    (`pip install wandb`; it uploads only with WANDB_MODE=online), or `module:Class`, such as
    `examples.trackers:MLflow` in a checkout (`libra.observe.metrics.Tracker`)."""
    progress: bool = True
    """Show live progress in the terminal."""
    callbacks: dict[Literal["on_iteration", "on_batch", "on_evaluation"], OwnPart] = {}
    """Functions of your own that the driver calls (`libra.driver.callbacks`): with the numbers of
    each iteration, with the trajectories of each batch after its step, with the result of each
    evaluation. E.g. `{on_iteration: "mine:log"}`."""


class StoreSection(Section):
    """Files that stay on disk."""

    keep_versions: AtLeastOne = 3
    """Weight versions to keep on disk beside those in use."""
    keep_journals: bool = False
    """Keep the per-quantum records of trajectories after their group is committed."""


class WeightsSection(Section):
    """The way of new weights to the engines."""

    transfer: Literal["shared", "peer"] = "shared"
    """Transport of new weights to the engines. shared: engines read the run directory. peer: each
    rollout worker fetches a version over the network from the nearest worker that has it, into its
    own directory; for workers that cannot read the run directory."""


class WatchdogSection(Section):
    """Reaction to a run without progress: no quantum, group, step or other task finishes."""

    timeout_s: Annotated[float, Field(ge=1)] | Literal["auto"] | None = "auto"
    """Seconds without progress after which the watchdog names the stalled task, worker and stage,
    and writes the worker's stacks to `stacks/` in the run directory. auto: 10 times the usual time
    of such tasks in this run, at least 60 s and the time-outs of its tools and graders; 600 s for a
    kind that was seen less than three times. A number is the limit for all kinds; set it above the
    longest optimizer step or tool call. If null, no watchdog."""
    restart: bool = False
    """Restart the stalled worker. Committed quanta of its trajectories are kept; the quantum in
    flight runs again."""


_MEMORY = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([KMGT])i?B")
_MIB = {"K": 2**-10, "M": 1, "G": 2**10, "T": 2**20}
_WALLTIME = re.compile(r"(\d+-)?\d{1,3}(:\d{2}){0,2}")
Role = Literal["rollout", "train", "tool"]


class SlurmJobs(Section):
    """Jobs of one role; each is one Dask worker."""

    partition: str | None = None
    """Partition to submit them to. If null, Slurm's default."""
    gpus: AtLeastZero = 0
    """GPUs of each job (--gres=gpu:N). For an entry of `cluster.engines` a number above 0 means its
    tensor-parallel degree."""
    cpus: AtLeastOne = 8
    """CPU cores of each job; of an entry of `cluster.engines`, of each tensor-parallel rank."""
    memory: str = "32 GiB"
    """Memory of each job, e.g. "64 GiB"; of an entry of `cluster.engines`, of each tensor-parallel
    rank."""
    walltime: str = "04:00:00"
    """Time limit in Slurm's form: MINUTES, HH:MM:SS or DAYS-HH:MM:SS. A worker takes no new work in
    the last two minutes."""
    directives: list[str] = []
    """Further lines for #SBATCH, e.g. ["--account=lab", "--exclusive"]."""
    skip: list[Literal["--mem", "--cpus-per-task", "--gres", "--ntasks", "--time"]] = []
    """Options to leave out of each job, where the site's sbatch refuses them, e.g. ["--mem"]."""

    @field_validator("memory")
    @classmethod
    def _memory_has_a_unit(cls, memory: str) -> str:
        found = _MEMORY.fullmatch(memory)
        if found is None or float(found[1]) * _MIB[found[2]] < 1:
            raise ValueError(f"{memory!r} is not an amount of memory of at least 1 MiB; type e.g. 64 GiB")
        return memory

    @field_validator("walltime")
    @classmethod
    def _walltime_is_slurms(cls, walltime: str) -> str:
        if not _WALLTIME.fullmatch(walltime):
            raise ValueError(f"{walltime!r} is not a time limit in Slurm's form; type e.g. 04:00:00 or 1-12:00:00")
        return walltime


class SlurmSection(Section):
    """A cluster of Slurm jobs (`libra cluster slurm`), one for each rollout, train and tool worker."""

    dir: Annotated[Path, Field(strict=False)] = Path("slurm")
    """Directory for its certificates, logs and cluster.json. All nodes must see it, and only its
    owner should read it."""
    host: str | None = None
    """Name or address at which the jobs reach the scheduler, which runs where `up` is typed. If null, the
    machine's address."""
    setup: list[str] = []
    """Shell lines at the beginning of each job, e.g. ["module load cuda/12.8"]."""
    python: str | None = None
    """Python of the jobs. If null, the one that runs `libra`, which all nodes must then have at the
    same path."""
    jobs: dict[Role, SlurmJobs] = {}
    """Jobs of each role, one for each of its workers in section `cluster`; a lost one is submitted
    again. E.g. `{train: {gpus: 1}}`."""

    def of_role(self, role: Role) -> SlurmJobs:
        """Jobs of a role's workers."""
        return self.jobs.get(role, SlurmJobs())


class RunSections(Section):
    """Every section of one run; `libra.config.RunConfig` adds the checks across sections."""

    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    environment: EnvironmentSection = EnvironmentSection()
    agent: AgentSection = AgentSection()
    rollout: RolloutSection = RolloutSection()
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
    simulation: SimulationSection = SimulationSection()
    planner: PlannerSection = PlannerSection()


INSTALL_VLLM = f"type: make setup-vllm (vLLM for CPUs), or on a GPU machine: {pip_install('vllm')}"


def vllm_is_installed() -> bool:
    """Whether vLLM can be imported, without importing it."""
    return find_spec("vllm") is not None


def check_vllm() -> None:
    """EngineError with the line to type if vLLM is missing."""
    if not vllm_is_installed():
        raise EngineError(
            f"rollout.engine: vllm is not installed here; {INSTALL_VLLM}; or type rollout.engine=transformers"
        )
