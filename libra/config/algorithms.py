"""Training algorithms by name: a preset of settings for each paper.

``trainer.algorithm`` fills the keys of ``trainer`` that are fields of `Preset` and were not given.
``make docs`` makes docs/algorithms.md from this table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import Field

from libra.config.section import Section

LossName = Literal["ppo", "gspo", "cispo", "sapo", "gmpo", "dppo", "vespo", "reinforce"]
AggregationMode = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
KLEstimator = Literal["k1", "abs", "k2", "k3", "k1+", "abs+", "k2+", "k3+"]
OldLogp = Literal["behaviour", "proximal", "exact", "version", "ewma"]
CorrectionAction = Literal["none", "truncate", "mask"]
LayoutName = Literal["ddp", "fsdp2", "fsdp2_offload"]
Divergence = Literal["tv", "kl"]
RejectMetric = Literal["none", "ratio", "k1", "k2", "k3", "k3-reverse", "binary-kl"]
RejectLevel = Literal["token", "sequence"]
RejectReduce = Literal["mean", "sum", "max"]
CorrectionLevel = Literal["token", "sequence", "geometric"]
AlgorithmName = Literal[
    "grpo",
    "dr_grpo",
    "dapo",
    "gspo",
    "cispo",
    "sapo",
    "gmpo",
    "rloo",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "opo",
    "remax",
    "ppo_decoupled",
    "dppo",
    "vespo",
    "opd",
]
DEFAULT_ALGORITHM: AlgorithmName = "dapo"
_Coefficient = Annotated[float, Field(gt=0)]
_AboveOne = Annotated[float, Field(gt=1)]


class ClipArgs(Section):
    """Arguments of the loss gmpo; losses with a clip have these and more."""

    clip_low: Annotated[float, Field(ge=0, le=1)] = 0.4
    clip_high: Annotated[float, Field(ge=0)] = 0.4


class CispoArgs(ClipArgs):
    """Arguments of the loss cispo."""

    clip_low: Annotated[float, Field(ge=0, le=1)] = 1.0
    clip_high: Annotated[float, Field(ge=0)] = 4.0


class PPOArgs(ClipArgs):
    """Arguments of the loss ppo."""

    clip_low: Annotated[float, Field(ge=0, le=1)] = 0.2
    clip_high: Annotated[float, Field(ge=0)] = 0.2
    dual_clip: _AboveOne | None = None
    ratio_max: _AboveOne | None = None


class GspoArgs(PPOArgs):
    """Arguments of the loss gspo."""

    clip_low: Annotated[float, Field(ge=0, le=1)] = 3e-4
    clip_high: Annotated[float, Field(ge=0)] = 4e-4


class SapoArgs(Section):
    """Arguments of the loss sapo."""

    tau_positive: _Coefficient = 1.0
    tau_negative: _Coefficient = 1.05


class DppoArgs(ClipArgs):
    """Arguments of the loss dppo."""

    clip_low: Annotated[float, Field(ge=0, le=1)] = 0.2
    clip_high: Annotated[float, Field(ge=0)] = 0.2
    divergence: Divergence = "tv"
    log_ratio_coef: Annotated[float, Field(ge=0)] = 0.0
    ratio_max: _AboveOne | None = None


class VespoArgs(Section):
    """Arguments of the loss vespo."""

    k_positive: _Coefficient = 2.0
    lambda_positive: _Coefficient = 3.0
    k_negative: _Coefficient = 3.0
    lambda_negative: _Coefficient = 2.0


class CorrectionArgs(Section):
    """Arguments of ``trainer.correction``."""

    level: CorrectionLevel = "token"
    low: _Coefficient | None = None
    high: _Coefficient | None = 2.0


class AdamArgs(Section):
    """Arguments of AdamW and the norm of its gradient."""

    betas: Annotated[
        tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]], Field(strict=False)
    ] = (0.9, 0.95)
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    max_grad_norm: _Coefficient = 1.0


class LateArgs(Section):
    """Arguments of ``trainer.late``."""

    versions: Annotated[int, Field(ge=1)] = 16
    wait_s: _Coefficient = 600.0


class LoraArgs(Section):
    """Adapters of ``trainer.lora_rank``."""

    alpha: _Coefficient = 32.0
    targets: Annotated[tuple[str, ...], Field(strict=False)] = ()


class KLArgs(Section):
    """Arguments of ``trainer.kl_coef``."""

    estimator: KLEstimator = "k3"
    in_reward: bool = False
    target: Annotated[float, Field(gt=0)] | None = None


class MismatchArgs(Section):
    """Thresholds of the mismatch alarm in nats."""

    mean: Annotated[float, Field(gt=0)] | None = None
    k3: Annotated[float, Field(gt=0)] | None = None


class RejectArgs(Section):
    """Arguments of ``trainer.reject``, and two masks beside it."""

    level: RejectLevel = "token"
    reduce: RejectReduce = "mean"
    low: float | None = None
    high: float | None = None
    off_policy: float | None = None
    m2po: Annotated[float, Field(ge=0)] | None = None


LOSS_ARGS: Mapping[str, type[Section]] = MappingProxyType({
    "ppo": PPOArgs, "gspo": GspoArgs, "cispo": CispoArgs, "sapo": SapoArgs, "gmpo": ClipArgs, "dppo": DppoArgs,
    "vespo": VespoArgs, "reinforce": Section,
})  # fmt: skip
"""Keys of ``trainer.loss_args`` by loss: the arguments of its function in `libra.train.losses`,
with the same defaults."""


ADVANTAGES: Mapping[str, tuple[Literal["group", "batch"], str]] = MappingProxyType(
    {
        "grpo": ("group", "the reward less the mean of its group"),
        "rloo": ("group", "the reward less the mean of its siblings"),
        "opo": ("group", "the reward less the mean of its group by tokens"),
        "remax": ("group", "the reward less the greedy answer's, the first sample of each group"),
        "reinforce_pp": ("batch", "rewards whitened over the batch"),
        "reinforce_pp_baseline": ("batch", "the reward less the mean of its group, whitened over the batch"),
    }
)
"""Advantage estimators that ship: the samples each looks at, and its advantage (`libra.train.advantages`)."""
GROUP_ADVANTAGES = tuple(name for name, (scope, _) in ADVANTAGES.items() if scope == "group")


@dataclass(frozen=True, slots=True)
class Preset:
    """Settings of an algorithm; names and meanings as in section ``trainer``."""

    advantage: str = "grpo"
    normalize_std: bool = True
    loss: LossName = "ppo"
    aggregation: AggregationMode = "token-mean"
    old_logp: OldLogp = "behaviour"
    loss_args: Mapping[str, Any] = field(default_factory=dict)
    correction: CorrectionAction = "none"
    correction_args: Mapping[str, Any] = field(default_factory=dict)
    kl_coef: float = 0.0


@dataclass(frozen=True, slots=True)
class Algorithm:
    """A preset, and its description for users.

    Attributes
    ----------
    what, when : str
        Description in one sentence, and recommended use.
    source, differs : str
        Paper, and differences from the paper or "".
    """

    preset: Preset
    what: str
    when: str
    source: str
    differs: str = ""


ALGORITHMS: Mapping[AlgorithmName, Algorithm] = MappingProxyType(
    {
        "grpo": Algorithm(
            Preset(aggregation="seq-mean-token-mean", kl_coef=0.04),
            "Clipped surrogate; the baseline is the group's mean, the scale its standard deviation.",
            "The reference point of most papers. Holds a second copy of the model for its KL term.",
            "DeepSeekMath, arXiv:2402.03300",
        ),
        "dr_grpo": Algorithm(
            Preset(normalize_std=False, aggregation="seq-mean-token-sum-norm"),
            "GRPO without its two biases: no division by the deviation, none by the length of the answer.",
            "Answers grow without getting better, or questions differ much in difficulty.",
            "Dr. GRPO, arXiv:2503.20783",
        ),
        "dapo": Algorithm(
            Preset(loss_args={"clip_high": 0.28}),
            "GRPO with a higher upper clip, equal weight for every token of the step, and no KL term.",
            "The default: verifiable rewards, answers of very different length.",
            "DAPO, arXiv:2503.14476",
            "Dynamic sampling is `trainer.train_prompts`: candidates are generated beforehand, not in further rounds; "
            "`trainer.drop_uniform_groups=true` leaves groups of equal rewards out without replacing them. The "
            "overlong penalty belongs in the reward function.",
        ),
        "gspo": Algorithm(
            Preset(loss="gspo", aggregation="seq-mean-token-mean"),
            "The clip applies to the geometric mean of a whole answer's ratios.",
            "Mixtures of experts, whose token ratios jump; long answers.",
            "GSPO, arXiv:2507.18071",
            "The clip is about a thousand times narrower than PPO's: with engines that do not agree with the trainer to "
            "1e-4 nats it clips on mismatch alone.",
        ),
        "cispo": Algorithm(
            Preset(loss="cispo"),
            "Log-probabilities weighted by a capped ratio without gradient: no token is ever dropped.",
            "Rare tokens carry the reasoning and PPO would clip them; off-policy batches.",
            "MiniMax-M1, arXiv:2506.13585",
            "The paper does not print its cap; 5 is what TRL and AReaL recommend.",
        ),
        "sapo": Algorithm(
            Preset(loss="sapo", aggregation="seq-mean-token-mean"),
            "A sigmoid gate instead of a clip, steeper for negative advantages (tau 1.0 and 1.05).",
            "Training is unstable at the edge of the clip.",
            "SAPO, arXiv:2511.20347",
        ),
        "gmpo": Algorithm(
            Preset(loss="gmpo", aggregation="seq-mean-token-mean"),
            "The geometric mean of an answer's ratios, each clipped in log space.",
            "Outlier ratios dominate the mean.",
            "GMPO, arXiv:2507.20673",
        ),
        "rloo": Algorithm(
            Preset(advantage="rloo", normalize_std=False, aggregation="seq-mean-token-sum"),
            "The baseline of a sample is the mean of its siblings; whole answers, not tokens, are the actions.",
            "Few samples per prompt; an unbiased gradient.",
            "RLOO, arXiv:2402.14740",
            "The paper's plain REINFORCE is clipped (0.2) here, which is the same on samples of the current weights. "
            "Its KL penalty in the reward is off; `trainer.kl_coef=0.05 trainer.kl_args.in_reward=true "
            "trainer.kl_args.estimator=k1` turns it on.",
        ),
        "reinforce_pp": Algorithm(
            Preset(advantage="reinforce_pp", normalize_std=False),
            "Rewards whitened over all tokens of the batch; the group plays no part.",
            "One sample per prompt (`trainer.group_size=1`), many prompts.",
            "REINFORCE++, arXiv:2501.03262",
            "Its KL penalty in the reward is off; `trainer.kl_coef=0.01 trainer.kl_args.in_reward=true "
            "trainer.kl_args.estimator=k1` turns it on.",
        ),
        "reinforce_pp_baseline": Algorithm(
            Preset(advantage="reinforce_pp_baseline", normalize_std=False),
            "The group's mean as baseline, the deviation of the whole batch as scale.",
            "Groups whose own deviation is noise: few samples, or nearly all alike.",
            "REINFORCE++, arXiv:2501.03262",
            "Its KL loss is off; `trainer.kl_coef=1e-5 trainer.kl_args.estimator=k2` turns it on.",
        ),
        "opo": Algorithm(
            Preset(advantage="opo", normalize_std=False, loss="reinforce", aggregation="seq-mean-token-sum"),
            "Plain policy gradient with the length-weighted baseline that minimises its variance.",
            "Exactly on-policy runs only: `run.eta=0` and one optimizer step per batch.",
            "OPO, arXiv:2505.23585",
        ),
        "remax": Algorithm(
            Preset(advantage="remax", normalize_std=False, aggregation="seq-mean-token-sum"),
            "The baseline of a group is the reward of its first sample, which is answered greedily and not trained on.",
            "One or few samples per prompt: `trainer.group_size=2` is one sample and its baseline.",
            "ReMax, arXiv:2310.10505",
            "The paper's plain REINFORCE is clipped (0.2) here, which is the same on samples of the current weights. Greedy "
            "answers count in the reported mean reward.",
        ),
        "ppo_decoupled": Algorithm(
            Preset(old_logp="proximal", correction="mask", correction_args={"high": 5.0}),
            "The clip is relative to the weights at the start of the step; a weight corrects for the engine's older weights.",
            "Asynchronous runs (`run.eta` above 0): stale tokens are neither clipped away nor trusted blindly.",
            "AReaL, arXiv:2505.24298",
            "Tokens whose weight exceeds 5 are masked, AReaL 1.0's default; the paper has no such bound.",
        ),
        "dppo": Algorithm(
            Preset(normalize_std=False, loss="dppo", loss_args={"log_ratio_coef": 1e-3}),
            "Tokens leave the gradient when their probability, not their ratio, moved by more than 0.2.",
            "Rare tokens: a ratio of 10 on a probability of 0.001 should not stop the update.",
            "DPPO, arXiv:2602.04879, as prime-rl runs it",
        ),
        "vespo": Algorithm(
            Preset(loss="vespo"),
            "Log-probabilities weighted by a smooth function of the whole answer's ratio, which falls on both sides of its peak.",
            "Off-policy batches of long answers, where products of ratios explode and clips cut too much.",
            "VESPO, arXiv:2602.10693",
            "Exponents and bounds as in TRL (`trainer.loss_args`).",
        ),
        "opd": Algorithm(
            Preset(normalize_std=False),
            "On-policy distillation: the student learns what a teacher would say where the student went; rewards are optional.",
            "There is a better model with the same tokenizer: `distil.teacher`, and [Distillation](distillation.md).",
            "AsyncOPD, arXiv:2606.24143",
            "The divergence of the teacher's likeliest tokens has one more outcome, any other token; the paper's cut sum has not.",
        ),
    }
)
"""Every algorithm of ``trainer.algorithm``."""


def preset_values(algorithm: str) -> dict[str, Any]:
    """The keys of ``trainer`` that an algorithm fills, with values; empty for an unknown name."""
    found = ALGORITHMS.get(algorithm)  # type: ignore[call-overload]
    if found is None:
        return {}
    values = asdict(found.preset)
    args: dict[str, type[Section]] = {"loss_args": LOSS_ARGS[values["loss"]], "correction_args": CorrectionArgs}
    return values | {name: kind(**values[name]).model_dump() for name, kind in args.items()}
