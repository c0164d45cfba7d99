"""Every setting of a run, as frozen pydantic models; `RunConfig` is the root.

The docstring under a field is its documentation: what it is, its unit, what it changes, what None means. The reference in
``docs/configuration.md`` and ``libra config --fields`` are made from it. Values are checked strictly: ``"3"`` is not a whole
number, ``1`` is not a truth value, ``nan`` is not a number.

Files and overrides are read by `libra.config.load`, which turns what pydantic reports into `libra.errors.ConfigError`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ModelWrapValidatorHandler, field_validator, model_validator

from libra.config.algorithms import (
    DEFAULT_ALGORITHM,
    AdvantageName,
    AggregationMode,
    AlgorithmName,
    CorrectionAction,
    CorrectionLevel,
    KLEstimator,
    LayoutName,
    LossName,
    OldLogp,
    preset_values,
)
from libra.config.cross_field_checks import cross_field_problems
from libra.config.planner import PlannerSection
from libra.config.section import AtLeastOne, AtLeastZero, Section
from libra.config.slurm import SlurmRolloutJobs, SlurmSection, SlurmToolJobs, SlurmTrainJobs
from libra.keys import check_run_name

PolicyName = Literal["cmlfq", "paper", "fifo", "mlfq", "completed_calls", "predictor", "oracle"]
"""Every ordering of `libra.policy.ORDERINGS`."""


class RunSection(Section):
    """The run as a whole: where it lives, how long it is, and how stale its data may be."""

    name: str | None = None
    """Name of the run: 1-63 letters, digits, '_' or '.', beginning with a letter or digit. None: made from the name of the
    configuration file and the time of the start."""
    dir: Annotated[Path, Field(strict=False)] = Path("runs")
    """Directory that holds runs; this one is written to `dir`/`name`, which must not hold a run yet."""
    seed: AtLeastZero = 0
    """Source of all randomness: prompts, sampling, tools. The same seed asks the same questions."""
    iterations: AtLeastOne = 50
    """Iterations (optimizer batches) to run."""
    eta: AtLeastZero = 0
    """Staleness bound, in weight versions: how far behind the newest weights a consumed token may be. 0: synchronous."""
    from_checkpoint: Annotated[Path, Field(strict=False)] | None = None
    """Checkpoint whose weights become version 0 and whose optimizer state goes on (`libra run --from`); steps count from 0 again.
    A Hugging Face directory without trainer.json gives its weights only. `model.path` stays the reference of `kl_coef`, and
    has to be the same architecture. None: start from `model.path`."""

    @field_validator("name")
    @classmethod
    def _name_fits_a_key(cls, name: str | None) -> str | None:
        return name if name is None else check_run_name(name)


class ModelSection(Section):
    """The language model to train."""

    path: Annotated[str, Field(min_length=1)] = "libra/tiny-arithmetic"
    """A Hugging Face id ("org/name"), a directory in Hugging Face layout, a model that ships with Libra ("libra/name"), or one that
    `libra model prepare` makes ready ("smollm2-135m")."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of the weights in engines and trainer."""
    master_dtype: Literal["float32"] | None = "float32"
    """Number format of the weights that the optimizer updates, and of its moments; the trainer's model and what is published are
    these, rounded to `dtype`. None: `dtype`; where that is bfloat16, learning rates below 1e-4 then lose most updates."""


class EnvironmentSection(Section):
    """What asks the questions, runs the tools and grades the answers."""

    name: Annotated[str, Field(min_length=1)] = "tool_arithmetic"
    """A registered environment, or "module:attribute" for one of your own."""
    args: dict[str, Any] = {}
    """Keyword arguments of its constructor. A file or a command line that changes `name` starts from empty `args`."""


class RolloutSection(Section):
    """How trajectories are generated."""

    engine: Literal["transformers", "vllm"] = "transformers"
    """Inference engine of a rollout worker: transformers in the worker's own process, or vLLM in processes of its own (`make
    setup-vllm`). Its settings are in section `vllm`."""
    tp: AtLeastOne = 1
    """Tensor-parallel degree of an engine (vllm). A worker that supplies the resource TP, or an entry of `cluster.engines`, says so
    for itself."""
    keep_kv: bool = False
    """When weights change while requests run, go on from the KV that older weights computed, which costs nothing and puts tokens
    off policy by that (vllm). Each such token is recorded with its KV's version. false: running requests are computed anew."""
    slots: AtLeastOne = 64
    """Trajectories that generate at once on one engine."""
    kv_cache_gib: Annotated[float, Field(gt=0)] | None = None
    """Most KV that one engine holds, in GiB (transformers; a vllm engine has `vllm.kv_cache_gib`). With less than all slots need at
    `max_context_tokens`, turns wait until theirs fits, and contexts kept between turns make way. None: what all slots need."""
    tool_format: Literal["hermes", "qwen3_coder"] | None = None
    """How the model writes tool calls: "hermes" (JSON; Hermes, Qwen2.5, Qwen3) or "qwen3_coder" (XML; Qwen3-Coder, Qwen3.5). None:
    as the environment says, which is "hermes" unless it says otherwise."""
    max_new_tokens: AtLeastOne = 64
    """Tokens one turn may generate; a turn that reaches it ends its trajectory as "length"."""
    max_turns: AtLeastOne = 12
    """Turns a trajectory may take."""
    max_context_tokens: AtLeastOne = 1024
    """Tokens of prompt, generations and observations together that a trajectory may reach."""
    temperature: Annotated[float, Field(ge=0)] = 1.0
    """Sampling temperature; 1 is the model's own distribution, 0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Probability mass that sampling keeps (nucleus); 1 keeps everything."""
    ignore_eos: bool = False
    """Every turn has exactly `max_new_tokens` tokens and is no end by itself: for benchmarks."""
    exact_logprobs: bool = False
    """Record the log-probability that each generation has when it is scored alone and uncached, as the trainer scores it for the
    mismatch figures, which then are exactly 0 where engine and trainer hold the same weights. Costs a forward pass of the whole
    context per turn in the engine, and per turn in the trainer. Needs engine transformers, top_p 1 and a temperature above 0."""


class VLLMSection(Section):
    """Settings of `rollout.engine` vllm."""

    kv_cache_gib: Annotated[float, Field(gt=0)] | None = None
    """KV cache per tensor-parallel rank, in GiB. None: on a CPU what `rollout.slots` requests of `rollout.max_context_tokens`
    need; on a GPU what `gpu_memory_frac` leaves. With less than all slots need, late requests are computed twice."""
    gpu_memory_frac: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of a GPU's memory that an engine takes for weights and KV cache."""
    eager: bool | None = None
    """Run the model as written. false: compiled and captured, which starts minutes later and runs faster. None: true on a CPU,
    false on a GPU."""


class TrainerSection(Section):
    """The algorithm, its batch and its optimizer (AdamW)."""

    algorithm: AlgorithmName = DEFAULT_ALGORITHM
    """Training algorithm: a preset for the keys marked (preset) that are not given, listed in docs/algorithms.md. A file or a
    command line that changes it starts from its preset."""
    prompts: AtLeastOne = 16
    """Groups in one batch: B prompts, each sampled `group_size` times."""
    group_size: AtLeastOne = 8
    """Trajectories per prompt (G); their mean reward is the baseline."""
    resample: AtLeastZero = 1
    """How often a trajectory that failed for a reason that is not the model's is tried again, and a failed grader is asked again.
    After that the group closes with the members it has; `docs/failures.md` has the rules."""
    lr: Annotated[float, Field(ge=0)] = 1e-4
    """Learning rate after warm-up. 0 measures without learning."""
    betas: Annotated[
        tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]], Field(strict=False)
    ] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moment."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """AdamW's decoupled weight decay."""
    warmup_steps: AtLeastZero = 0
    """Optimizer steps over which the learning rate rises linearly from 0."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Norm to which the gradient is clipped."""
    advantage: AdvantageName = "grpo"
    """(preset) How much better than expected a trajectory was: against its group (grpo, rloo, opo), the batch (reinforce_pp),
    or its group on the batch's scale (reinforce_pp_baseline)."""
    normalize_std: bool = True
    """(preset) Divide advantages by the standard deviation of their group (GRPO); false leaves the centred reward (Dr. GRPO).
    Of `advantage` grpo."""
    std_eps: Annotated[float, Field(ge=0)] = 1e-6
    """Added to that standard deviation before dividing."""
    drop_uniform_groups: bool = False
    """Leave groups whose rewards are all equal out of the step, means included. They are not replaced by new prompts."""
    drop_truncated: bool = False
    """Leave trajectories that were cut off ("length") out of the step; they still count in the baseline of their group."""
    loss: LossName = "ppo"
    """(preset) Loss of a token, from its probability ratio and advantage."""
    aggregation: AggregationMode = "token-mean"
    """(preset) From losses of tokens to the loss of the step: mean over tokens; mean over sequences of the sum or mean over
    tokens; the former over a fixed length (-norm); sum over a constant."""
    loss_divisor: Annotated[float, Field(gt=0)] | None = None
    """Of `aggregation` seq-mean-token-sum-norm, in tokens, where None is `rollout.max_context_tokens`; and of constant."""
    old_logp: OldLogp = "behaviour"
    """(preset) Whose log-probability the ratio is to: the engine's as recorded (behaviour), the trainer's at the start of the
    step (proximal), or the trainer's for tokens of the weights being trained and the engine's for stale ones (exact). The
    latter two cost a forward pass where one batch takes several optimizer steps."""
    clip_low: Annotated[float, Field(ge=0, le=1)] = 0.2
    """(preset) The probability ratio is clipped below at 1 - `clip_low`; gmpo clips its logarithm, dppo bounds the probability."""
    clip_high: Annotated[float, Field(ge=0)] = 0.28
    """(preset) The probability ratio is clipped above at 1 + `clip_high`."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """For negative advantages the loss is at most this many times the advantage (ppo and gspo). None: not bounded."""
    tau_positive: Annotated[float, Field(gt=0)] = 1.0
    """Of `loss` sapo: steepness of the gate for positive advantages."""
    tau_negative: Annotated[float, Field(gt=0)] = 1.05
    """Of `loss` sapo: steepness of the gate for the others."""
    log_ratio_coef: Annotated[float, Field(ge=0)] = 0.0
    """(preset) Of `loss` dppo: weight of the squared log ratio, which holds the policy near the engine's."""
    correction: CorrectionAction = "none"
    """(preset) What becomes of a token's importance weight, trainer over engine, outside [`correction_low`,
    `correction_high`]: the bound (truncate), or 0 (mask). none: no weights. Needs `old_logp` proximal or exact."""
    correction_level: CorrectionLevel = "token"
    """The weight is the token's ratio, the product over its sequence, or the geometric mean over it."""
    correction_low: Annotated[float, Field(gt=0)] | None = None
    """Smallest weight. None: no bound."""
    correction_high: Annotated[float, Field(gt=0)] | None = 2.0
    """(preset) Largest weight. None: no bound."""
    kl_coef: Annotated[float, Field(ge=0)] = 0.0
    """(preset) Weight of the KL term to the model of `model.path`. 0: no reference model is loaded."""
    kl_estimator: KLEstimator = "k3"
    """Estimator of that term; with + its value has the gradient of k2, which is the gradient of the divergence."""
    kl_bound: Annotated[float, Field(gt=0)] | None = 10.0
    """Largest estimate of a token, in nats. None: not bounded."""
    entropy_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the entropy bonus, in units of loss per nat."""
    epochs: AtLeastOne = 1
    """Passes over each batch."""
    minibatches: AtLeastOne = 1
    """Optimizer steps per pass; one batch takes `epochs` x `minibatches` of them."""
    max_row_tokens: AtLeastOne = 512
    """Trajectories are packed into rows of up to this many tokens; a longer one has a row of its own. Short rows are faster
    on a CPU, where attention pays for the square of a row; changes no result."""
    share_prompts: bool = True
    """Samples of a group that fit into a row of `max_row_tokens` together run their prompt through the model once. Only for
    models with nothing but full attention, others are packed without; changes no result."""
    micro_batch_tokens: AtLeastOne = 4096
    """Tokens per forward and backward pass. Bounds memory, changes no result."""
    logit_chunk_tokens: AtLeastOne = 1024
    """Generated tokens whose logits the trainer holds at once, times the vocabulary: the others are made and made again in the
    backward pass. Bounds memory, changes no result but for the rounding of sums."""
    mismatch_alarm: Annotated[float, Field(gt=0)] | None = None
    """Alarm where the mean |log p(rollout) - log p(trainer)| of a step, over tokens of the very weights being trained, is above
    this many nats. float32 shows about 1e-6, bfloat16 about 0.01. None: it is only recorded."""
    mismatch_action: Literal["warn", "pause", "stop"] = "warn"
    """What the alarm does: a line in the log; take this step and no further one (`libra resume` goes on); or not even this one."""
    layout: LayoutName = "ddp"
    """How the model lies on `cluster.train_workers` replicas: whole on each (ddp), or weights, gradients and optimizer state in
    shards (fsdp2), which needs 1 / replicas of the memory and more network. Nothing where there is one replica."""
    dispatch: Literal["storage", "peer"] = "storage"
    """How a step comes to its trajectories. "storage": every replica reads the whole batch from the run directory. "peer": each
    replica fetches its slice over the network from the workers that graded it, and what those lost from the run directory;
    the whole batch where `epochs` x `minibatches` steps of it begin with a pass over it (`old_logp`) or `exact_logprobs` is set."""
    gradient_checkpointing: bool = False
    """Keep a layer's input alone and compute the rest again in the backward pass: less memory, about a third more computing."""
    offload: bool = False
    """Keep shards in host memory between their uses; with `layout` ddp, which has none, an error. For GPUs: on a CPU a warning."""

    @model_validator(mode="wrap")
    @classmethod
    def _preset(cls, given: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        """Fill what was not given from the algorithm's preset; it does not count as given (``model_fields_set``)."""
        if not isinstance(given, dict):
            return validate(given)
        preset = preset_values(given.get("algorithm", DEFAULT_ALGORITHM))
        made = validate({**preset, **given})
        made.model_fields_set.difference_update(preset.keys() - given.keys())
        return made


class CheckpointSection(Section):
    """What can be started from again: checkpoints in Hugging Face layout with the optimizer's state, in RUN/checkpoints."""

    every: AtLeastZero | None = None
    """Steps from one checkpoint to the next; the last step always makes one. 0: only the last. None: at each evaluation
    (`evaluation.every`), or every 10 steps where there is none. A checkpoint holds the weights and twice as much optimizer
    state, and while it is written a copy of that is in the trainer's memory."""
    keep: AtLeastOne = 2
    """Checkpoints kept: the last so many, beside the best."""
    keep_best: bool = True
    """Also keep the best one, and link it as `checkpoints/best`: by mean reward of the held-out questions where `evaluation.every`
    asks them as the run goes, else by the mean training reward of the iteration."""


class EvaluationSection(Section):
    """Held-out questions, asked with training's sampling unless said otherwise."""

    prompts: AtLeastZero = 0
    """Held-out questions asked before the first and after the last step. 0: no evaluation."""
    every: AtLeastZero = 0
    """Ask them also after every n-th iteration. 0: only first and last."""
    temperature: Annotated[float, Field(ge=0)] | None = None
    """Sampling temperature of the evaluation. None: that of `rollout`."""


class PolicySection(Section):
    """Which waiting trajectory gets the next free slot, and where."""

    name: Literal["cmlfq", "fifo", "mlfq", "completed_calls", "paper"] = "cmlfq"
    """cmlfq: by what is believed to be left of each, learned from what tools return; without measured skill, least generated
    first. fifo: first come, first served. mlfq: least generated first. completed_calls: most tool calls first (DynaRL). paper:
    the Libra paper's rule. docs/scheduling.md compares them."""
    objective: Literal["makespan", "stream"] = "makespan"
    """Of cmlfq. makespan: longest expected first, so that the iteration is over soon. stream: groups are completed one after the
    other, so that a step can begin while others generate (`run.eta` of 1 or more)."""
    patience: AtLeastOne = 200_000
    """Times that others park for the same kind of slot, after which a trajectory that waits goes first,
    beside one for each that waited when it came. The default is five thousand trajectories of forty turns: a bound for what
    would never run otherwise. With a small number everything is overdue, and the order is first come, first served. Not for
    fifo and paper."""
    boundaries_tokens: dict[Literal["tp1", "tp2", "tp4", "tp8"], Annotated[float, Field(gt=0)]] = {}
    """Of cmlfq: generated tokens up to which a trajectory had best begin on engines of a tensor-parallel degree, e.g. {"tp1": 3000,
    "tp2": 12000}; longer ones on those of a higher degree. What a plan (`libra plan`) means by its buckets; it is followed where
    a slot is free there and no other engine would be over sooner by a quarter. Empty: load alone decides."""


class EngineGroup(Section):
    """Rollout workers that are alike, and so one bucket."""

    tp: AtLeastOne = 1
    """Tensor-parallel degree of their engines."""
    threads: AtLeastOne | None = None
    """Torch threads per engine, or per tensor-parallel rank. None: `cluster.threads`."""
    slots: AtLeastOne | None = None
    """Trajectories that generate at once on one of them. None: `rollout.slots`."""
    count: AtLeastOne = 1
    """Number of such workers."""
    min_pass_s: Annotated[float, Field(gt=0)] | None = None
    """Seconds that each forward pass of one of them takes at least (transformers): it waits out the rest. Makes engines of
    different speeds on one machine, for measurements and tests. None: as fast as it can."""


class ClusterSection(Section):
    """The Dask cluster: one that is there already, or local processes."""

    scheduler: Annotated[str, Field(min_length=1)] | None = None
    """Address of a running Dask scheduler, as tcp://HOST:PORT, or the cluster.json that `libra cluster slurm` wrote. None: a
    local cluster of processes is made for the run."""
    rollout_workers: AtLeastOne = 1
    """Rollout workers of a local cluster or of `libra cluster slurm`, one engine each. A given scheduler brings its own workers."""
    engines: Annotated[tuple[EngineGroup, ...], Field(strict=False)] = ()
    """Rollout workers of several kinds instead, e.g. `[{tp: 1, count: 2}, {tp: 2, threads: 1, slots: 128}]`: each entry is a
    bucket, and on Slurm a kind of job. A given scheduler has to have exactly these. Empty: `rollout_workers` alike, with
    `rollout.tp`; a given scheduler's, whatever they are."""
    train_workers: AtLeastOne = 1
    """Core training replicas, one process each, which take every step together as one group. A given scheduler brings its own
    workers, as many with TRAIN=1."""
    hybrid_workers: Annotated[int, Field(ge=0)] = 0
    """Rollout workers that can change roles in mid-run (train beside the core replicas, or lend their GPUs), the first of them. A
    given scheduler brings its own, as many with HYBRID=1. 0: every worker stays what it was started for."""
    drain_timeout_s: Annotated[float, Field(gt=0)] | None = None
    """Seconds that a worker which changes roles lets its running generations end. After that they are aborted, what they have
    generated is lost, and other workers generate those turns anew. None: it waits for them."""
    tool_workers: AtLeastOne = 1
    """Workers that run tools and graders, of a local cluster or of `libra cluster slurm`. A given scheduler brings its own."""
    tool_slots: AtLeastOne = 64
    """Actions that run at once on one tool worker."""
    threads: AtLeastOne | None = None
    """Torch threads per worker. None: as many as the machine has cores."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where training replicas and transformers engines compute. auto: on the first GPU that the worker sees (CUDA_VISIBLE_DEVICES),
    else on the CPU. cuda: an error where a worker sees none. vLLM engines compute on what their installation is for."""
    dashboard_port: Annotated[int, Field(ge=0, le=65535)] = 8787
    """Port of Dask's dashboard with the Libra page. 0: any free port; a busy port is an error."""


class ObserveSection(Section):
    """What is shown and recorded beside the trajectories."""

    tensorboard: bool = True
    """Write metrics for TensorBoard into the run directory."""
    event_log: bool = True
    """Write every scheduling event and command to events.jsonl."""
    progress: bool = True
    """Show live progress in the terminal."""


class StoreSection(Section):
    """What is kept on disk."""

    keep_versions: AtLeastOne = 3
    """Weight versions kept on disk beside those in use."""
    keep_journals: bool = False
    """Keep the per-quantum records of trajectories after their group is committed."""


class WeightsSection(Section):
    """How new weights come to the engines."""

    transfer: Literal["shared", "peer"] = "shared"
    """"shared": engines read the run directory. "peer": each rollout worker fetches a version over the network from the nearest
    worker that has it, into a directory of its own; for workers that do not see the run directory's weights."""


class WatchdogSection(Section):
    """What happens when a run stops making progress: no quantum, group, step or other task is finished."""

    timeout_s: Annotated[float, Field(ge=1)] | None = 600.0
    """Seconds without progress after which the task, worker and stage to blame are named and the worker's stacks written to
    `stacks/` in the run directory. Set it above the longest optimizer step or tool call. None: nobody looks."""
    restart: bool = False
    """Restart the worker to blame. What its trajectories had committed is kept; the quantum in flight runs again."""


class SimulationSection(Section):
    """What `libra simulate` runs in virtual time: engines, a workload, and a policy. Sizes of groups and batches are those of
    `trainer`, staleness and seed those of `run`."""

    gpu: Annotated[str, Field(min_length=1)] = "A800-80G"
    """GPU of the engines: a name of `libra/hardware/gpus`, or a file of that form."""
    calibration: Annotated[Path, Field(strict=False)] | None = None
    """File that `libra calibrate RUN --save` wrote: engines, trainer and what is between them are as that run measured them,
    instead of `gpu` and `model`. It has to be of the model that `model.path` names. None: the GPU's tables."""
    model: Annotated[str, Field(min_length=1)] = "Qwen3-14B"
    """Model whose seconds are simulated: a name of `libra/hardware/models`, or a Hugging Face directory or config.json."""
    layout: dict[Literal["tp1", "tp2", "tp4", "tp8"], AtLeastOne] = {"tp2": 8}
    """Engines by tensor-parallel degree, e.g. {"tp2": 8, "tp8": 1}: eight engines of two GPUs and one of eight."""
    slots: AtLeastOne | None = None
    """Generations at once on each engine. None: as many as have room in its KV memory at their mean length, 256 at most; with
    `calibration` as many as the measured engine takes."""
    policy: PolicyName = "cmlfq"
    """Who goes first, and where: cmlfq (forecasts of what is left), paper (the published rule), fifo, mlfq (least attained
    service), completed_calls (DynaRL), predictor (lengths foreseen with `accuracy`), oracle (the true lengths)."""
    objective: Literal["makespan", "stream"] = "makespan"
    """Of cmlfq, predictor and oracle: the iteration ends soon, or groups are complete soon, one after the other."""
    accuracy: Annotated[float, Field(gt=0, le=1)] = 0.6
    """Of predictor: correlation of the logarithm of foreseen and true lengths."""
    traces: Annotated[Path, Field(strict=False)] | None = None
    """File of agent turns (CSV, one row a turn) that trajectories are drawn from. None: they are made up, of `turns` turns."""
    turns: AtLeastOne = 36
    """Mean number of turns of made-up trajectories."""
    iterations: AtLeastOne = 1
    """Iterations to simulate."""
    train_s: Annotated[float, Field(ge=0)] | None = None
    """Seconds of an optimizer step with its weight update. None: 0, or with `calibration` what the measured trainer takes."""
    load_s: Annotated[float, Field(ge=0)] | None = None
    """Seconds in which an engine takes new weights; running requests then compute their context again. None: 0, or with
    `calibration` as measured."""
    tool_slots: AtLeastOne | None = None
    """Actions at once. None: as many as are asked for."""
    noise: bool = False
    """Draw the seconds of engines around the predicted ones, with the residuals that measured kernels left; the same seed draws
    the same."""


class RunConfig(Section):
    """Every setting of one run. Build it with `load_config` or `config_from_dict`, whose errors are Libra's own."""

    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    environment: EnvironmentSection = EnvironmentSection()
    rollout: RolloutSection = RolloutSection()
    vllm: VLLMSection = VLLMSection()
    trainer: TrainerSection = TrainerSection()
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

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        problems = cross_field_problems(self)
        if problems:
            raise ValueError("; ".join(problem.message for problem in problems))
        return self
