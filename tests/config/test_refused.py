"""What a configuration refuses: each rule of each setting has its row here, and nowhere else.

A row is what is typed (overrides, separated by " & "), the field that the error names, the value that it names, and a word of what
it says to type. Rules that need a model's files, an environment or this machine are in tests/first_hour.
"""

import pytest

from libra.config import RunConfig, config_from_dict
from libra.errors import ConfigError

# (typed, nearest): the error also says where it was typed.
MISSPELT = (
    ("trainer.learning_rate=1", "trainer.lr"), ("trainer.groupsize=4", "trainer.group_size"), ("seed=1", "run.seed"),
    ("trainer.seed=1", "run.seed"), ("rollout.top-p=1", "rollout.top_p"), ("train.lr=1", "trainer.lr"),
    ("run.staleness=3", "run.eta"), ("run.max_steps=3", "run.iterations"), ("trainer.beta=0.1", "trainer.kl_coef"),
    ("trainer.num_generations=8", "trainer.group_size"), ("model.model_name_or_path=x", "model.path"),
    ("rollout.Temperature=1", "rollout.temperature"), ("cluster.workers=3", "cluster.tool_workers"),
)  # fmt: skip

# (typed, value, allowed or what to type): the field is the one that was typed.
WRONG_VALUES = (
    ("run.iterations=ten", "'ten'", "run.iterations=50"),
    ("run.iterations='3'", "'3'", "run.iterations=3, without quotes"),
    ("run.iterations=20.0", "20.0", "run.iterations=20"), ("run.iterations=1e3", "1000.0", "run.iterations=1000"),
    ("run.iterations=null", "null", "run.iterations=50"), ("run.iterations=0", "0", "run.iterations=50"),
    ("run.seed=true", "True", "run.seed=0"), ("run.seed=-1", "-1", "run.seed=0"), ("run.eta=-1", "-1", "run.eta=0"),
    ("run.name=a/b", "'a/b'", "letters, digits"), (f"run.name={'x' * 64}", "xxxx", "1-63"),
    ("model.path=''", "''", "model.path=libra/tiny-arithmetic"),
    ("model.dtype=float16", "'float16'", "one of float32, bfloat16"),
    ("environment.args=3", "3", "environment.args={}"),
    ("environment.tools={mpc: x}", "'mpc'", "environment.tools={mcp: python my_server.py}"),
    ("services.named=judge", "'judge'", "services.named={judge: {model: Qwen/Qwen3-4B}}"),
    ("services.named={j: {max_batch: 0}}", "0", "max_batch: 8"),
    ("services.named={j: {function: jugde}}", "'jugde'", "function: judge"),
    ("services.named={1judge: {model: x}}", "1judge", "services.named"), ("rollout.engine=sglang", "'sglang'", "vllm"),
    ("rollout.slots=0", "0", "rollout.slots=64"), ("rollout.top_p=0", "0", "rollout.top_p=1"),
    ("rollout.top_p=1.5", "1.5", "rollout.top_p=1"), ("rollout.temperature=-0.5", "-0.5", "rollout.temperature=1"),
    ("rollout.max_new_tokens=0", "0", "rollout.max_new_tokens=64"), ("rollout.tool_format=xml", "'xml'", "qwen3_coder"),
    ("rollout.kv_cache_gib=0", "0", "rollout.kv_cache_gib="), ("rollout.kv_host_gib=0", "0", "rollout.kv_host_gib="),
    ("rollout.kv_cache_gib=-1", "-1", "rollout.kv_cache_gib="),
    ("trainer.algorithm=Dr_GRPO", "'Dr_GRPO'", "trainer.algorithm=dr_grpo"),
    ("trainer.loss=hinge", "'hinge'", "trainer.loss=ppo"), ("trainer.advantage=gae", "'gae'", "trainer.advantage=grpo"),
    ("trainer.lr='1e-4'", "'1e-4'", "trainer.lr=0.0001, without quotes"),
    ("trainer.lr=.nan", "nan", "trainer.lr=0.0001"), ("trainer.lr=-1e-4", "-0.0001", "trainer.lr=0.0001"),
    ("trainer.adam_args.betas=[0.9]", "[0.9]", "trainer.adam_args.betas=[0.9, 0.95]"),
    ("trainer.adam_args.betas=[0.9, 1.0]", "1", "trainer.adam_args.betas=[0.9, 0.95]"),
    ("trainer.normalize_std=no", "'no'", "trainer.normalize_std=true"),
    ("trainer.normalize_std=1", "1", "trainer.normalize_std=true"),
    ("trainer.loss_args.clip_low=2", "2", "trainer.loss_args.clip_low=0.2"),
    ("trainer.adam_args.max_grad_norm=.inf", "inf", "trainer.adam_args.max_grad_norm=1.0"),
    ("trainer.adam_args.max_grad_norm=0", "0", "trainer.adam_args.max_grad_norm=1"),
    ("trainer.group_size=0", "0", "trainer.group_size=8"), ("trainer.prompts=-3", "-3", "trainer.prompts=16"),
    ("trainer.no_signal=raise", "'raise'", "trainer.no_signal=warn"),
    ("trainer.layout=zero3", "'zero3'", "trainer.layout=ddp"),
    ("trainer.dispatch=nccl", "'nccl'", "trainer.dispatch=storage"),
    ("trainer.loss_args.dual_clip=1", "1", "trainer.loss_args.dual_clip="),
    ("trainer.loss_args.ratio_max=1", "1", "trainer.loss_args.ratio_max="),
    ("trainer.reject=k4", "'k4'", "trainer.reject=none"), ("trainer.reject_args.m2po=-1", "-1", "trainer.reject_args"),
    ("distil.teacher={servce: judge}", "{servce: judge}", "distil.teacher=MODEL"),
    ("distil.tokens=0", "0", "distil.tokens=64"), ("distil.divergence=jensen", "jensen", "distil.divergence"),
    ("checkpoint.keep=0", "0", "checkpoint.keep=2"), ("checkpoint.every=-1", "-1", "checkpoint.every="),
    ("evaluation.prompts=-1", "-1", "evaluation.prompts=0"),
    ("evaluation.temperature=-1", "-1", "evaluation.temperature="), ("policy.name=lifo", "'lifo'", "policy.name=fifo"),
    ("policy.patience=0", "0", "policy.patience=200000"), ("policy.boundaries_tokens={tp3: 100}", "tp3", "tp1"),
    ("policy.boundaries_tokens={tp1: lots}", "lots", "a number, above 0"),
    ("policy.boundaries_tokens={tp2: 30, tp1: 30}", "30", "rise"),
    ("cluster.rollout_workers=0", "0", "cluster.rollout_workers=1"), ("cluster.threads=0", "0", "cluster.threads=null"),
    ("cluster.device=gpu", "'gpu'", "cluster.device=auto"),
    ("cluster.dashboard_port=99999", "99999", "cluster.dashboard_port=8787"),
    ("cluster.dashboard_names=['a b']", "a b", "cluster.dashboard_names=[]"),
    ("cluster.drain_timeout_s=0", "0", "cluster.drain_timeout_s="),
    ("cluster.engines=[{tp: two}]", "two", "cluster.engines=[]"),
    ("store.keep_versions=0", "0", "store.keep_versions=3"),
    ("weights.transfer=rdma", "'rdma'", "weights.transfer=shared"),
    ("slurm.jobs.rollout.memory=lots", "'lots'", "64 GiB"),
    ("slurm.jobs.train.walltime=tomorrow", "'tomorrow'", "04:00:00"),
    ("slurm.jobs.tool.cpus=0", "0", "slurm.jobs.tool.cpus=8"), ("observe.trackers=[neptune]", "neptune", "wandb"),
    ("planner.num_gpus=0", "0", "planner.num_gpus="), ("planner.tp=[]", "[]", "planner.tp=[1, 2, 4, 8]"),
    ("planner.lengths.trained_frac=0", "0", "planner.lengths.trained_frac"),
    ("planner.lengths.trained_frac=1.5", "1.5", "planner.lengths.trained_frac"),
    ("planner.fixed_engines={tp2: 1}", "tp2", "planner.fixed_engines"),
)  # fmt: skip

TEACHER = "trainer.algorithm=opd & distil.teacher=t"
SAMPLED = f"{TEACHER} & distil.estimator=sampled & distil.divergence=reverse"
SERVICES = "services.named={judge: {model: m}, teacher: {model: m, function: teach}} & trainer.algorithm=opd"
LATE = "trainer.late=correct"
TURNING = "trainer.streaming=on & trainer.turning=on & cluster.rollout_workers=3 & cluster.hybrid_workers=2"
OVER_AGE = "run.eta=1 & staleness.over_age"

CONTRADICTIONS = (
    ("rollout.max_new_tokens=2000", "rollout.max_new_tokens", "2000", "rollout.max_new_tokens=1024"),
    ("rollout.max_context_tokens=8192", "rollout.max_context_tokens", "8192", "trainer.micro_batch_tokens=8192"),
    ("rollout.temperature=0", "rollout.temperature", "0", "rollout.temperature=1.0"),
    ("rollout.tp=2", "rollout.tp", "transformers", "rollout.engine=vllm"),
    ("rollout.keep_kv=true", "rollout.keep_kv", "transformers", "rollout.engine=vllm"),
    ("rollout.engine=vllm & rollout.kv_host_gib=1.0", "rollout.kv_host_gib", "vllm", "rollout.engine_args"),
    ("rollout.engine=vllm & rollout.speculate=true", "rollout.speculate", "vllm", "rollout.engine_args"),
    ("rollout.exact_logprobs=true & rollout.top_p=0.9", "rollout.exact_logprobs", "0.9", "rollout.top_p=1"),
    ("trainer.group_size=1", "trainer.group_size", "1", "trainer.group_size=8"),
    ("trainer.minibatches=500", "trainer.minibatches", "500", "trainer.minibatches=128"),
    ("trainer.micro_batch_tokens=256 & rollout.max_context_tokens=128",
     "trainer.micro_batch_tokens", "256", "trainer.micro_batch_tokens=512"),
    ("trainer.loss=reinforce & run.eta=1", "trainer.loss", "reinforce", "trainer.loss=ppo"),
    ("trainer.loss=reinforce & trainer.minibatches=2", "trainer.minibatches", "2", "trainer.loss=ppo"),
    ("trainer.algorithm=opo & run.eta=1", "trainer.loss", "reinforce", "trainer.loss=ppo"),
    ("trainer.correction=mask", "trainer.correction", "mask", "trainer.old_logp=proximal"),
    ("trainer.loss=dppo & trainer.loss_args.dual_clip=3", "trainer.loss_args.dual_clip", "dppo", "divergence"),
    ("trainer.loss_args.log_ratio_coef=0.1", "trainer.loss_args.log_ratio_coef", "trainer.loss=ppo", "clip_low, clip_high"),
    ("trainer.kl_args.in_reward=true & trainer.kl_coef=0.1", "trainer.kl_args", "grpo", "trainer.advantage=rloo"),
    ("trainer.kl_args.target=0.1 & trainer.kl_coef=0.1", "trainer.kl_args", "0.1", "trainer.kl_args.in_reward=true"),
    ("trainer.algorithm=reinforce_pp & trainer.gamma=0.9 & trainer.drop_truncated=true",
     "trainer.drop_truncated", "0.9", "trainer.drop_truncated=false"),
    ("trainer.algorithm=remax & trainer.group_size=1", "trainer.group_size", "1", "trainer.group_size=2"),
    ("trainer.group_size=1 & trainer.normalize_std=false & trainer.drop_uniform_groups=true",
     "trainer.drop_uniform_groups", "true", "trainer.drop_uniform_groups=false"),
    ("trainer.algorithm=ppo_decoupled & trainer.correction_args.low=9.0",
     "trainer.correction_args", "9", "trainer.correction_args.low=5.0 or less"),
    ("trainer.reject=ratio", "trainer.reject", "no high", "trainer.reject_args.high=2.0"),
    ("trainer.reject=binary-kl & trainer.reject_args.low=0.1", "trainer.reject", "no high", "trainer.reject_args.high=2.0"),
    ("trainer.reject=k1 & trainer.reject_args.low=3 & trainer.reject_args.high=1", "trainer.reject_args", "3", "reject_args.low=1"),
    ("trainer.reject=ratio & trainer.reject_args.high=0", "trainer.reject_args", "0", "trainer.reject_args.high=2,"),
    ("trainer.reject=k3 & trainer.reject_args.high=-1", "trainer.reject_args", "-1", "trainer.reject_args.high=1,"),
    ("trainer.loss=vespo & trainer.old_logp=proximal & trainer.correction=mask & trainer.correction_args.level=sequence",
     "trainer.correction_args", "sequence", "trainer.correction_args.level=token"),
    ("evaluation.every=2 & evaluation.prompts=0", "evaluation.every", "2", "evaluation.prompts=256"),
    ("checkpoint.every=3 & evaluation.prompts=4 & evaluation.every=2", "checkpoint.every", "3", "checkpoint.every=2"),
    ("watchdog.restart=true & watchdog.timeout_s=null", "watchdog.restart", "null", "watchdog.timeout_s=auto"),
    ("cluster.hybrid_workers=3", "cluster.hybrid_workers", "3", "cluster.hybrid_workers=1"),
    ("cluster.rollout_workers=2 & cluster.engines=[{slots: 8}]", "cluster", "2", "type"),
    ("cluster.engines=[{tp: 2, cnt: 1}]", "cluster.engines.0.cnt", "cnt", "threads"),
    ("policy.name=fifo & policy.boundaries_tokens={tp1: 5}", "policy.boundaries_tokens", "5", "policy.name=cmlfq"),
    ("planner.lengths.generated_p50_tokens=1000 & planner.lengths.generated_p99_tokens=10",
     "planner.lengths", "10", "planner.lengths.generated_p99_tokens=4000"),
    ("planner.layout=auto & cluster.train_workers=2", "cluster.train_workers", "auto", "planner.layout=configured"),
    # staleness
    ("run.eta=1 & staleness.window=3", "staleness.window", "3", "run.eta=1"),
    (f"{OVER_AGE}=drop & trainer.streaming=auto", "trainer.streaming", "auto", "trainer.streaming=off"),
    (f"{OVER_AGE}=correct & trainer.old_logp=proximal", "staleness.over_age", "correct", "trainer.correction=truncate"),
    (f"{OVER_AGE}=correct & trainer.old_logp=version & trainer.correction=truncate", "trainer.old_logp", "version", "run.eta"),
    (f"{OVER_AGE}=mask & trainer.algorithm=reinforce_pp & trainer.gamma=0.9", "trainer.gamma", "0.9", "type"),
    # late rewards
    (f"{LATE} & trainer.algorithm=reinforce_pp", "trainer.late", "reinforce_pp", "trainer.advantage=grpo"),
    (f"{LATE} & trainer.minibatches=2", "trainer.late", "2", "trainer.minibatches=1"),
    (f"{LATE} & trainer.algorithm=rloo & trainer.kl_args.in_reward=true & trainer.kl_coef=0.1",
     "trainer.late", "true", "trainer.kl_args.in_reward=false"),
    (f"{LATE} & trainer.loss=reinforce", "trainer.late", "reinforce", "trainer.loss=ppo"),
    (f"{LATE} & trainer.loss=package.module:loss", "trainer.late", "package.module:loss", "type"),
    (f"{LATE} & trainer.old_logp=proximal", "trainer.late", "proximal", "trainer.correction=truncate"),
    (f"{LATE} & trainer.streaming=on", "trainer.late", "on", "trainer.late=off"),
    ("trainer.late=wait & trainer.streaming=on", "trainer.late", "on", "trainer.late=off"),
    ("trainer.late=drop & trainer.streaming=on", "trainer.late", "on", "trainer.late=off"),
    # distillation
    ("trainer.algorithm=opd", "distil.teacher", "null", "distil.teacher=MODEL"),
    ("distil.teacher=t & trainer.algorithm=gspo", "distil.teacher", "gspo", "trainer.algorithm=opd"),
    ("trainer.algorithm=opd & distil.teacher=''", "distil.teacher", "''", "name of a model"),
    (f"{SAMPLED} & rollout.top_p=0.9", "distil.estimator", "rollout.top_p=0.9", "rollout.top_p=1"),
    (f"{SAMPLED} & rollout.engine=vllm", "distil.tokens", "64", "distil.tokens=1"),
    (f"{SERVICES} & distil.teacher={{service: techer}}", "distil.teacher", "'techer'", "'teacher'"),
    (f"{SERVICES} & distil.teacher={{service: judge}}", "distil.teacher", "'judge'", "function: teach"),
    # streamed steps
    ("trainer.streaming=on & trainer.epochs=2", "trainer.streaming", "2 optimizer steps", "type"),
    ("trainer.streaming=on & trainer.minibatches=4", "trainer.streaming", "4 optimizer steps", "type"),
    ("trainer.streaming=on & trainer.algorithm=reinforce_pp", "trainer.streaming", "advantage=reinforce_pp", "type"),
    ("trainer.streaming=on & trainer.advantage=reinforce_pp_baseline", "trainer.streaming", "_baseline", "type"),
    ("trainer.streaming=on & trainer.reject_args.m2po=0.04", "trainer.streaming", "reject_args.m2po=0.04", "type"),
    ("trainer.streaming=on & trainer.advantage=workflows.own:advantage", "trainer.streaming", "own:advantage", "type"),
    ("run.eta=0 & trainer.streaming=on & trainer.batches=first_come", "trainer.batches", "run.eta=0", "run.eta=1"),
    ("run.eta=1 & trainer.batches=first_come", "trainer.batches", "trainer.streaming=off", "trainer.streaming=on"),
    ("run.eta=1 & trainer.streaming=auto & trainer.epochs=2 & trainer.batches=first_come",
     "trainer.batches", "2 optimizer steps", "trainer.batches=own"),
    # engines that turn
    (f"{TURNING} & trainer.streaming=off", "trainer.turning", "on", "trainer.streaming=on"),
    (f"{TURNING} & cluster.hybrid_workers=0", "trainer.turning", "on", "cluster.hybrid_workers=1"),
    (f"{TURNING} & cluster.rollout_workers=1 & cluster.hybrid_workers=1",
     "trainer.turning", "on", "cluster.rollout_workers=2"),
    (f"{TURNING} & rollout.engine=vllm & rollout.tp=2", "trainer.turning", "2", "rollout.tp=1"),
    (f"{TURNING} & planner.replan=apply", "trainer.turning", "on", "planner.replan=advise"),
)  # fmt: skip

NOT_OVERRIDES = (
    ("run.iterations", "'run.iterations'", "override", "section.key=value"),
    ("=3", "'=3'", "override", "section.key=value"),
    ("run..seed=3", "'run..seed=3'", "override", "section.key=value"),
    ("seed:3", "'seed:3'", "override", "section.key=value"),
    ("trainer=3", "trainer", "section", "trainer.algorithm=dapo"),
    ("run.seed=", "run.seed", "no value", "run.seed=0"),
    ("trainer.lr.x=3", "trainer.lr.x", "keys", "trainer.lr"),
    ("trainer.adam_args.betas=[0.9,, 0.95]", "trainer.adam_args.betas", "0.9,,", "check"),
    ("run.name=a #1", "run.name", "a #1", "quotes"),
    ("run.seed=!!python/object:os.system x", "run.seed", "python/object", "quotes"),
)


def problem(typed):
    with pytest.raises(ConfigError) as caught:
        config_from_dict({}, typed.split(" & "))
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    return message


@pytest.mark.parametrize(("typed", "nearest"), MISSPELT)
def test_an_unknown_key_is_named_with_the_nearest(typed, nearest):
    message = problem(typed)
    assert "unknown key" in message and f"mean {nearest}?" in message and repr(typed) in message


@pytest.mark.parametrize(("typed", "value", "allowed"), WRONG_VALUES)
def test_a_wrong_value_is_named_with_its_field_and_what_to_type(typed, value, allowed):
    message = problem(typed)
    assert message.startswith(typed.partition("=")[0])
    assert value in message and allowed in message


@pytest.mark.parametrize(("typed", "field", "value", "says"), [*CONTRADICTIONS, *NOT_OVERRIDES])
def test_what_does_not_go_together_is_named_with_what_to_type(typed, field, value, says):
    message = problem(typed)
    assert field in message and value in message and says in message


def test_contradictions_cannot_be_built_in_python_either():
    with pytest.raises(ValueError, match="group size"):
        RunConfig.model_validate({"trainer": {"group_size": 1}})
    assert config_from_dict({}, ["trainer.group_size=1", "trainer.normalize_std=false"]).trainer.group_size == 1


def test_a_contradiction_is_not_reported_of_a_field_that_is_wrong_by_itself():
    assert "deviation" not in problem("trainer.group_size=1 & trainer.normalize_std=perhaps")
