"""Sections on a run's task: length, model, environment, agent, services, teacher, staleness."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, field_validator

from libra.config.section import AtLeastOne, AtLeastZero, OwnOr, OwnPart, Section, VariableNames
from libra.config.yaml_text import one_line_yaml
from libra.keys import check_run_name

POLICIES = ("cmlfq", "fifo", "mlfq")
"""Names in `libra.policy.ORDERINGS`."""


class RunSection(Section):
    """The run as a whole: its directory, its length, and how stale its data may be."""

    name: str | None = None
    """Name of the run: 1-63 letters, digits, '_' or '.', beginning with a letter or digit. If
    null, the name of the configuration file and the time of the start."""
    dir: Annotated[Path, Field(strict=False)] = Path("runs")
    """Directory that holds runs; this one is written to `dir`/`name`, which must not hold a run
    yet."""
    seed: AtLeastZero = 0
    """Seed of all randomness: prompts, sampling, tools. The same seed draws the same prompts."""
    iterations: AtLeastOne = 50
    """Iterations (optimizer batches) to run."""
    eta: AtLeastZero = 0
    """Staleness bound: the largest number of weight versions by which a trained token may be behind
    the newest weights. 0: synchronous. Section `staleness` refines it."""
    from_checkpoint: Annotated[Path, Field(strict=False)] | None = None
    """Checkpoint that gives version 0 its weights, and the optimizer its state (`libra run
    --from`); steps count from 0. A Hugging Face directory without trainer.json gives only weights.
    The reference model of `kl_coef` stays `model.path`, which must have the same architecture. If
    null, the run starts from `model.path`."""

    @field_validator("name")
    @classmethod
    def _name_fits_a_key(cls, name: str | None) -> str | None:
        return name if name is None else check_run_name(name)


class ModelSection(Section):
    """The language model to train."""

    path: Annotated[str, Field(min_length=1)] = "libra/tiny-arithmetic"
    """A Hugging Face id ("org/name"), a directory in Hugging Face layout, a model that ships with
    Libra ("libra/name"), or one that workflows/prepare_model.py writes ("smollm2-135m")."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of the weights in engines and trainer."""
    master_dtype: Literal["float32"] | None = "float32"
    """Number format of the weights and moments that the optimizer updates. They are rounded to
    `dtype` for training and publication. If null, `dtype`; with bfloat16, learning rates below 1e-4
    then lose most updates."""
    loader: OwnPart | None = None
    """A `libra.model_loader.ModelLoader` of your own, which builds model and tokenizer from the
    directory, for trainer and transformers engines. If null, transformers builds them."""


class EnvironmentSection(Section):
    """The environment: it gives prompts, runs tools and grades answers."""

    name: Annotated[str, Field(min_length=1)] = "tool_arithmetic"
    """A registered environment, or "module:attribute" for one of your own."""
    args: dict[str, Any] = {}
    """Keyword arguments of its constructor. A file or a command line that changes `name` starts
    from empty `args`."""
    quotas: dict[str, str | int] = {}
    """Limits over all workers, by the names that tools give in `quota`, e.g. `{search: 10/s}`:
    calls per s, min or h, or, as a bare number, concurrent calls. Further calls wait."""
    retries: AtLeastZero = 5
    """Retries of a tool, reward or service whose API refused a call with HTTP 429 or
    `libra.errors.RateLimited`. The first wait takes up to a second, each further one twice as long,
    and never less than the API asks for (Retry-After)."""
    tools: dict[Literal["mcp"], Annotated[str, Field(min_length=1)]] = {}
    """Tool servers beside the environment's own tools: `{mcp: COMMAND}` starts COMMAND once on each
    worker and speaks MCP on its standard input and output."""
    tools_env: VariableNames = ()
    """Names of further environment variables for tool servers (docs/security.md lists those they
    always get), e.g. `[SEARCH_API_KEY]`. Each must be set where workers run, and where the run is
    started."""


class CheckpointSection(Section):
    """Checkpoints to start from: Hugging Face layout with the optimizer's state, in
    RUN/checkpoints."""

    every: AtLeastZero | None = None
    """Steps between checkpoints; the last step always writes one. 0: only the last. If null, at each
    evaluation (`evaluation.every`), or every 10 steps without evaluations. A checkpoint holds the
    weights and twice as much optimizer state; the trainer's memory holds a copy of it while it is
    written."""
    keep: AtLeastOne = 2
    """Newest checkpoints to keep, beside the best, which `checkpoints/best` links to: best by mean
    reward on the held-out questions with `evaluation.every`, else by the mean training reward of
    the iteration."""


class EvaluationSection(Section):
    """Held-out questions, answered with the sampling settings of training."""

    prompts: AtLeastZero = 0
    """Held-out questions before the first and after the last step. 0: no evaluation."""
    every: AtLeastZero = 0
    """Evaluate also after every n-th iteration. 0: only first and last."""
    temperature: Annotated[float, Field(ge=0)] | None = None
    """Sampling temperature of the evaluation. If null, `rollout.temperature`."""


class PolicySection(Section):
    """Which waiting trajectory gets the next free slot, and where."""

    name: Annotated[str, OwnOr(POLICIES)] = "cmlfq"
    """cmlfq: by forecasts of remaining tokens, learned from what tools return; without measured
    skill by arrival, or for objective stream least attained service first. fifo: first come, first served. mlfq: least attained
    service first. docs/scheduling.md compares them. Your own: `libra.policy.Ordering`."""
    objective: Literal["makespan", "stream"] = "makespan"
    """For cmlfq. makespan: longest forecast first, so that the iteration ends soon. stream:
    complete one group after the other, so that a step can begin while other groups generate
    (`run.eta` of 1 or more)."""
    patience: AtLeastOne = 200_000
    """Starvation bound, in parkings (a trajectory parks when it starts to wait for a slot). A
    trajectory is served next after this many further parkings for its kind of slot, plus one for
    each trajectory that already waited when it parked. The default equals five thousand
    trajectories of forty turns. With a small number every trajectory is overdue, and the order is
    first come, first served. Not for fifo; a policy of your own may take it."""
    boundaries_tokens: dict[Literal["tp1", "tp2", "tp4", "tp8"], Annotated[float, Field(gt=0)]] = {}
    """For cmlfq: forecast tokens up to which a trajectory starts on engines of a tensor-parallel
    degree, e.g. {"tp1": 3000, "tp2": 12000}; longer ones start on higher degrees. `libra plan`
    prints these boundaries of its buckets. They hold where a slot is free and no other engine would
    finish a quarter sooner. Empty: only load decides."""


class AgentSection(Section):
    """An agent of your own: for each prompt it is started, asks the model over OpenAI's or
    Anthropic's API, and ends."""

    function: OwnPart | None = None
    """A Python function that is called for each trajectory, as "module:attribute". Its parameters
    may be prompt, messages, facts, base_url, api_key and the columns of a row; it may be async. If
    null, there is no agent, or `command` is one."""
    command: Annotated[str, Field(min_length=1)] | None = None
    """A command line that is started for each trajectory, e.g. "python agent.py". It reads the task
    as JSON from its standard input; the last line that it prints is its result. If null, there is
    no agent, or `function` is one."""
    venv: Annotated[Path, Field(strict=False)] | None = None
    """Virtual environment of the agent, whose packages need not fit Libra's. If null, Libra's own."""
    env: VariableNames = ()
    """Names of further environment variables for agents (docs/security.md lists those they always
    get), e.g. `[SEARCH_API_KEY]`. Each must be set where workers run."""
    timeout_s: Annotated[float, Field(gt=0)] = 3600.0
    """Seconds after its start at which an agent is killed; its trajectory fails with class
    `timeout`. Waiting for the model or for a slot counts."""
    idle_s: Annotated[float, Field(gt=0)] = 600.0
    """Longest time between two requests of an agent to the model, in seconds; then it is killed, as
    by `timeout_s`."""
    concurrency: AtLeastOne = 256
    """Agents that exist at once on one tool worker. At most `cluster.tool_slots` of them work at
    once; an agent that waits for the model takes no slot."""

    @property
    def given(self) -> bool:
        """Whether an agent is configured."""
        return self.function is not None or self.command is not None


MODEL_FUNCTIONS = ("judge", "logprob", "score", "embed", "teach")
"""Functions of a service that need only its model (docs/rewards.md)."""


def _named(name: str) -> str:
    if re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]{0,62}", name) is None:
        raise ValueError(
            f"{name!r} is not the name of a service: a letter and at most 62 letters, digits, - and _; type e.g. "
            "services.named={judge: {model: Qwen/Qwen3-4B}}"
        )
    return name


class ServiceEntry(Section):
    """One service."""

    model: Annotated[str, Field(min_length=1)] | None = None
    """Model, named as `model.path` is. It stays in the worker's memory, and is restored to the
    device when it is asked. If null, the service is a plain function."""
    function: Annotated[str, OwnOr(MODEL_FUNCTIONS)] = "judge"
    """Its answer. judge: the model's probability of "yes". logprob: the mean
    log-probability of the completion. score: the number of a reward model with one label. embed:
    the mean of the last hidden states. teach: a teacher's log-probs of each generated token, for
    `distil.teacher` only. Your own: `f(inputs, **args)`, or with a `model` `f(model, tokenizer,
    inputs, **args)`, which returns one value for each input."""
    args: dict[str, Any] = {}
    """Further keyword arguments of `function`."""
    max_batch: AtLeastOne = 8
    """Requests that are answered together at most."""
    max_wait_s: Annotated[float, Field(ge=0)] = 0.05
    """Seconds that a request waits for others, so that they are answered together."""
    timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """Seconds after which a batch fails: for the device to be free, for its weights to be there,
    and for its answers, each."""


class ServicesSection(Section):
    """Reward models, judges, teachers, embedders: asked by rewards and tools with `libra.ask`,
    shared by the runs of a worker."""

    named: dict[Annotated[str, AfterValidator(_named)], ServiceEntry] = {}
    """Services by name, e.g. `{judge: {model: Qwen/Qwen3-4B}}` (docs/rewards.md)."""
    device_gib: Annotated[float, Field(gt=0)] | None = None
    """Memory for the weights of services on a worker's device. If they do not fit together, the
    least recently used ones are evicted, and restored for their next request. If null, all memory
    of a CPU; 90 % of a GPU's free memory at the start of the run."""


OverAge = Literal["wait", "drop", "mask", "correct"]


class StalenessSection(Section):
    """Age of the tokens in a step, amount generated ahead of it, and what happens to
    what comes too late."""

    window: Annotated[int, Field(ge=2)] | None = None
    """Weight versions alive at once: the newest, and all since the oldest that a group being
    generated has tokens of. A batch waits for the groups that would widen it. If null, no bound of its
    own (`over_age` wait leaves `run.eta` + 1)."""
    versions: Literal["many", "one"] = "many"
    """Weight versions in one trajectory. many: engines take new weights at once, and their
    trajectories go on with them. one: a trajectory keeps the weights that it began with. An engine
    then takes new ones when all that began there have ended, and until then none begins there; a
    trajectory whose engine is lost begins again from its prompt. Not with `cluster.hybrid_workers`."""
    engines: Literal["emptied", "rounded"] = "emptied"
    """For `versions` one, which engines take new weights. emptied: each, when all that began there
    have ended. rounded: also those above their version's share of the engines, which is its share
    of the trajectories, rounded (DORA); the engine of a version with the fewest trajectories gives
    them to others of that version with room, with their KV if `rollout.kv_host_gib` is set."""
    over_age: OverAge = "wait"
    """Treatment of a group with tokens older than the bound. wait: batches wait for late groups, so
    that none gets too old. With the others no batch waits: drop leaves the group out of its batch,
    mask leaves out its tokens beyond the bound, and correct trains on all of it, weighed by the
    algorithm's ratio. What is left out counts in no denominator. Needs `run.eta` above 0 and
    `trainer.streaming` off: groups of a streamed step are never over age."""


KLDirection = Literal["forward", "reverse"]
DistilEstimator = Literal["top_k", "sampled"]


def _teacher(value: object) -> object:
    name = value.get("service") if isinstance(value, dict) and len(value) == 1 else value
    if value is None or (isinstance(name, str) and name):
        return value
    got = one_line_yaml(value)
    raise ValueError(
        f"got {got}; allowed: the name of a model (a directory, a Hugging Face id or libra/NAME), or a mapping with the key "
        "service; type e.g. distil.teacher=MODEL, or distil.teacher={service: NAME} for one of services.named"
    )


class DistilSection(Section):
    """On-policy distillation (`trainer.algorithm` opd): docs/distillation.md."""

    teacher: Annotated[str | dict[str, str] | None, BeforeValidator(_teacher)] = None
    """Teacher model, named as `model.path` is: a directory, a Hugging Face id, or libra/NAME. It
    needs the student's tokenizer, and gets a worker of its own. `{service: NAME}`: the model of a
    service of `services.named` with function teach, on the tool workers. If null, there is no
    teacher."""
    divergence: KLDirection = "forward"
    """Divergence to minimise, token by token on the student's own text. forward: KL(teacher ||
    student), which covers everything the teacher may write. reverse: KL(student || teacher), which
    drops what the teacher would not write."""
    estimator: DistilEstimator = "top_k"
    """Estimate of the divergence without the whole vocabulary. top_k: over the teacher's likeliest
    `tokens` and "any other" as one more, without noise. sampled: without bias from `tokens` per place,
    drawn by the teacher (forward) or by the student as it generates (reverse; the log ratio is computed
    anew when training, and weighed by the change since: AsyncOPD)."""
    tokens: AtLeastOne = 64
    """Tokens of each place that the estimator uses: the likeliest k, or m drawn ones. With `estimator`
    sampled and `divergence` reverse 1 is the generated token itself; more need `rollout.engine`
    transformers."""
    reward_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the policy loss beside the divergence. 0: rewards are only reported."""
    wait_s: Annotated[float, Field(ge=0)] = 600.0
    """Longest time, in seconds, for which a batch waits for the teacher's scores. Trajectories
    without scores then train by their rewards only (`reward_coef` above 0), or not at all. 0: no
    waiting."""

    @property
    def service(self) -> str | None:
        """Name of the service that is the teacher; None if no service is."""
        return self.teacher["service"] if isinstance(self.teacher, dict) else None
