"""Sections about what a run does: its length, model, environment, agent, services, teacher and
staleness."""

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
    """Name of the run: 1-63 letters, digits, '_' or '.', beginning with a letter or digit. None:
    the name of the configuration file and the time of the start."""
    dir: Annotated[Path, Field(strict=False)] = Path("runs")
    """Directory that holds runs; this one is written to `dir`/`name`, which must not hold a run
    yet."""
    seed: AtLeastZero = 0
    """Seed of all randomness: prompts, sampling, tools. The same seed draws the same prompts."""
    iterations: AtLeastOne = 50
    """Iterations (optimizer batches) to run."""
    eta: AtLeastZero = 0
    """Staleness bound, in weight versions: how far behind the newest weights a consumed token may
    be. 0: synchronous. Section `staleness` has what belongs to it."""
    from_checkpoint: Annotated[Path, Field(strict=False)] | None = None
    """Checkpoint whose weights become version 0 and whose optimizer state is continued (`libra run
    --from`); steps count from 0. A Hugging Face directory without trainer.json gives its weights
    only. `model.path` stays the reference of `kl_coef` and must have the same architecture. None:
    start from `model.path`."""

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
    """Number format of the weights that the optimizer updates, and of its moments; the model in
    training and the published weights are these, rounded to `dtype`. If null, `dtype`; with bfloat16,
    learning rates below 1e-4 then lose most updates."""
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
    """Limits that tools name with `quota`, over all workers, e.g. `{search: 10/s}`: calls per s,
    min or h, or, as a bare number, calls at once. Calls beyond it wait."""
    retries: AtLeastZero = 5
    """Times that a tool, a reward or a service is tried again after its API has refused a call with
    HTTP 429 or `libra.errors.RateLimited`. The first wait takes up to a second, each further one
    twice as long, and at least as long as the API asks for (Retry-After)."""
    tools: dict[Literal["mcp"], Annotated[str, Field(min_length=1)]] = {}
    """Tool servers, whose tools come beside the environment's own: `{mcp: COMMAND}` starts COMMAND
    once on each worker and speaks MCP on its standard input and output."""
    tools_env: VariableNames = ()
    """Names of environment variables that tool servers are given beside those that they always have
    (docs/security.md), e.g. `[SEARCH_API_KEY]`. Each must be set where workers run, and where the
    run is started."""


class CheckpointSection(Section):
    """Checkpoints to start from: Hugging Face layout with the optimizer's state, in
    RUN/checkpoints."""

    every: AtLeastZero | None = None
    """Steps between checkpoints; the last step always writes one. 0: only the last. If null, at each
    evaluation (`evaluation.every`), or every 10 steps without evaluations. A checkpoint holds the
    weights and twice as much optimizer state; the trainer's memory holds a copy of it while it is
    written."""
    keep: AtLeastOne = 2
    """Newest checkpoints to keep, beside the best, which `checkpoints/best` names: by mean reward
    on the held-out questions with `evaluation.every`, else by the mean training reward of the
    iteration."""


class EvaluationSection(Section):
    """Held-out questions, answered with the sampling settings of training."""

    prompts: AtLeastZero = 0
    """Held-out questions before the first and after the last step. 0: no evaluation."""
    every: AtLeastZero = 0
    """Evaluate also after every n-th iteration. 0: only first and last."""
    temperature: Annotated[float, Field(ge=0)] | None = None
    """Sampling temperature of the evaluation. If null, that of `rollout`."""


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
    """Starvation bound, counted in parkings (a trajectory begins to wait for a slot). A trajectory
    is served next after this many further parkings for its kind of slot, plus one for each
    trajectory that already waited when it parked. The default equals five thousand trajectories of
    forty turns. With a small number every trajectory is overdue, and the order is first come, first
    served. Not for fifo; for a policy of your own if it takes it."""
    boundaries_tokens: dict[Literal["tp1", "tp2", "tp4", "tp8"], Annotated[float, Field(gt=0)]] = {}
    """For cmlfq: generated tokens up to which a trajectory begins on engines of a tensor-parallel
    degree, e.g. {"tp1": 3000, "tp2": 12000}; longer ones begin on higher degrees. `libra plan`
    prints these boundaries of its buckets. They are followed if a slot is free there and no other
    engine would finish a quarter sooner. Empty: load alone decides."""


class AgentSection(Section):
    """An agent of your own: for each prompt it is started, asks the model over OpenAI's or
    Anthropic's API, and ends."""

    function: OwnPart | None = None
    """A Python function that is called for each trajectory, as "module:attribute". It takes by name
    any of prompt, messages, facts, base_url, api_key and the columns of a row, and may be async.
    If null, there is no agent, or it is a `command`."""
    command: Annotated[str, Field(min_length=1)] | None = None
    """A command line that is started for each trajectory, e.g. "python agent.py". It reads the task
    as JSON from its standard input; its result is the last line that it prints. If null, there is no
    agent, or it is a `function`."""
    venv: Annotated[Path, Field(strict=False)] | None = None
    """Virtual environment of the agent, whose packages need not fit Libra's. If null, Libra's own."""
    env: VariableNames = ()
    """Names of environment variables that agents are given beside those that they always have
    (docs/security.md), e.g. `[SEARCH_API_KEY]`. Each must be set where workers run."""
    timeout_s: Annotated[float, Field(gt=0)] = 3600.0
    """Seconds after its start at which an agent is killed; its trajectory fails with class
    `timeout`. Time in which the model writes or other trajectories have its slot counts."""
    idle_s: Annotated[float, Field(gt=0)] = 600.0
    """Seconds that an agent may work without asking the model; then it is killed, as by
    `timeout_s`."""
    concurrency: AtLeastOne = 256
    """Agents that exist at once on one tool worker. Of these, `cluster.tool_slots` may work at
    once; those that wait for the model take no slot."""

    @property
    def given(self) -> bool:
        """Whether there is an agent."""
        return self.function is not None or self.command is not None


MODEL_FUNCTIONS = ("judge", "logprob", "score", "embed", "teach")
"""What a service with a model can be asked without code of one's own (docs/rewards.md)."""


def _named(name: str) -> str:
    if re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]{0,62}", name) is None:
        raise ValueError(
            f"{name!r} is no name of a service, which is a letter and at most 62 letters, digits, - and _; type e.g. "
            "services.named={judge: {model: Qwen/Qwen3-4B}}"
        )
    return name


class ServiceEntry(Section):
    """One service."""

    model: Annotated[str, Field(min_length=1)] | None = None
    """Model, named as `model.path` is. It stays in the worker's memory, and is restored to the
    device when it is asked. If null, the service is a plain function."""
    function: Annotated[str, OwnOr(MODEL_FUNCTIONS)] = "judge"
    """What it answers. judge: the probability that the model says yes. logprob: the mean
    log-probability of the completion. score: the number of a reward model with one label. embed:
    the mean of the last hidden states. teach: what a teacher says of each generated token, for
    `distil.teacher` alone. Your own: `f(inputs, **args)`, or with a `model` `f(model, tokenizer,
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
    """Memory for their weights on the device of a worker. If they do not fit together, those used
    longest ago are evicted, and restored when they are asked again. If null, all of a CPU's; on a GPU
    90 % of what is free when the run starts."""


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
    """What happens to a group that would be consumed beyond the bound. wait: it does not come to
    that, because batches wait for late groups. Otherwise no batch waits, and the batch that takes
    it leaves it out as a whole (drop), leaves its tokens beyond the bound out (mask), or trains on
    all of it, with the ratio that the algorithm corrects by (correct). What is left out counts in
    no denominator. Needs `run.eta` above 0 and `trainer.streaming` off: groups of a streamed step
    are never over age."""


KLDirection = Literal["forward", "reverse"]
DistilEstimator = Literal["top_k", "sampled"]


def _teacher(value: object) -> object:
    name = value.get("service") if isinstance(value, dict) and len(value) == 1 else value
    if value is None or (isinstance(name, str) and name):
        return value
    got = one_line_yaml(value)
    raise ValueError(
        f"got {got}; allowed is the name of a model (a directory, a Hugging Face id or libra/NAME), or a mapping with the key "
        "service; type e.g. distil.teacher=MODEL, or distil.teacher={service: NAME} for one of services.named"
    )


class DistilSection(Section):
    """On-policy distillation (`trainer.algorithm` opd): docs/distillation.md."""

    teacher: Annotated[str | dict[str, str] | None, BeforeValidator(_teacher)] = None
    """Model to learn from, named as `model.path` is: a directory, a Hugging Face id, or libra/NAME.
    It has the tokenizer of the student. A worker of its own holds it. `{service: NAME}`: the model
    of a service of `services.named` with function teach, which lives on the tool workers with the
    others. If null, there is none."""
    divergence: KLDirection = "forward"
    """What is made small, token by token on what the student wrote. forward: KL(teacher ||
    student), which covers all that the teacher may say. reverse: KL(student || teacher), which
    leaves out what the teacher would not say."""
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
    """Weight of the policy loss, from rewards, beside the divergence. 0: rewards are only reported."""
    wait_s: Annotated[float, Field(ge=0)] = 600.0
    """Seconds that a batch waits for trajectories that the teacher has not scored yet; then it
    trains without them, and with `reward_coef` above 0 their rewards still count. 0: it does not
    wait."""

    @property
    def service(self) -> str | None:
        """The service that is the teacher; If null, it is none, or there is no teacher."""
        return self.teacher["service"] if isinstance(self.teacher, dict) else None
