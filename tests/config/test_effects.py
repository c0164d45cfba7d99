"""The table of effects against the code: each command reads exactly the settings that the table says."""

import itertools
from pathlib import Path

import pytest

from libra.config import RunConfig, config_from_dict, load_config, resolve_model
from libra.config.effects import READ, Situation
from libra.config.field_help import sections
from libra.config.task_sections import POLICIES

TEACHES = {"model": "Qwen3-8B", "function": "teach"}


@pytest.fixture(scope="module")
def tiny_model():
    return Path(resolve_model("libra/tiny-arithmetic"))


def read_by(build, config):
    """Dotted names of ``config`` that ``build`` reads, recorded by its sections."""
    seen = set()

    def recorded(section_name, section):
        class Recorded(type(section)):
            def __getattribute__(self, key):
                if key in type(section).model_fields:
                    seen.add(f"{section_name}.{key}")
                return super().__getattribute__(key)

        return Recorded.model_construct(**{key: getattr(section, key) for key in type(section).model_fields})

    parts = {name: recorded(name, getattr(config, name)) for name in sections()}
    seen.clear()
    build(RunConfig.model_construct(**parts))
    return seen


def effective(config, command, prefix=""):
    """Names that ``command`` reads under this configuration, according to the table."""
    situation = Situation(command)
    return {
        name
        for name, reading in READ.items()
        if name.startswith(prefix) and command in reading and all(n.met(config, situation) for n in reading[command])
    }


def test_libra_plan_reads_what_the_table_says(tmp_path):
    from libra.cli.plan_command import print_plan

    def plan(config):
        print_plan(config, "libra/quickstart", trace=None, why=(), what_if=True, write=None, as_json=True)

    trace = tmp_path / "turns.csv"
    trace.write_text("task,sample,turn,prompt_tokens,completion_tokens,tool_s\na,0,0,10,20,\na,1,0,10,30,0.5\n")
    base = load_config("libra/quickstart", ["model.path=Qwen3-0.6B", "trainer.prompts=2", "trainer.group_size=2"])
    taught = load_config(
        "libra/quickstart",
        ["model.path=Qwen3-0.6B", "trainer.algorithm=opd", "distil.teacher=Qwen3-8B", "planner.num_gpus=3"],
    )
    service = {"distil": {"teacher": {"service": "t"}}, "services": {"named": {"t": TEACHES}}}
    served = config_from_dict(taught.model_dump() | service)
    judged = config_from_dict(base.model_dump() | {"services": {"named": {"judge": {"model": "Qwen3-0.6B"}}}})
    for given, changes in ((base, {}), (base, {"trace": trace}), (taught, {}), (served, {}), (judged, {})):
        config = given.model_copy(update={"planner": given.planner.model_copy(update=changes)})
        # The planner reads the degree of engines off planner.tp alone when it may plan what does not run.
        assert read_by(plan, config) | {"rollout.engine"} == effective(config, "plan") | {"rollout.engine"}


def test_a_run_that_replans_reads_of_the_planner_what_the_table_says():
    from types import SimpleNamespace

    from libra.driver.planning import Planning
    from libra.planner.arrangement_forecast import run_facts

    def replan(config):
        spec = SimpleNamespace(config=config, model_dir=resolve_model("libra/tiny-arithmetic"))
        Planning(spec, scheduler=None, prompts=None, write=None)
        run = run_facts(config)
        run.may_have("vllm", 2)
        run.ratio(1, 2, 4.0, 100.0)

    config = config_from_dict({"planner": {"replan": "advise"}})
    read = {name for name in read_by(replan, config) if name.startswith("planner.")}
    # Whether a run replans its driver asks, and what it starts is asked before it begins.
    assert read | {"planner.replan", "planner.layout", "planner.planned"} == effective(config, "run", "planner.")


@pytest.mark.parametrize("policy", ["fifo", "cmlfq", "mlfq", None])
@pytest.mark.parametrize("drawn_from_traces", [False, True])  # with traces also a teacher
def test_libra_simulate_reads_what_the_table_says(policy, drawn_from_traces, tmp_path):
    from libra.cli.simulate import simulate_run

    def simulate(config):
        simulate_run(config, from_run=None, workload=None, save_workload=None, as_json=False)

    trace = tmp_path / "turns.csv"
    head = "source,model,task,sample,turn,tool,status,payload_chars,prompt_tokens,completion_tokens,llm_s,tool_s,gap_s"
    rows = [
        f"s,m,t{task},{sample},{turn},bash,ok,40,{100 + 20 * turn},20,1,0.1,0"
        for task, sample, turn in itertools.product(range(4), range(2), range(3))
    ]
    trace.write_text("\n".join([head, *rows]) + "\n")
    config = config_from_dict({
        "trainer": {"prompts": 2, "group_size": 2} | ({"algorithm": "opd"} if drawn_from_traces else {}),
        "distil": {"teacher": {"service": "t"} if policy is None else "Qwen3-8B"} if drawn_from_traces else {},
        "services": {"named": {"t": TEACHES} if policy is None and drawn_from_traces else {}},
        "policy": {"name": policy or "mlfq"}, "rollout": {"engine": "vllm"},
        "cluster": {"engines": [{"tp": 2}] if drawn_from_traces else []},
        "planner": {"lengths": {"turns": 2}} | ({"trace": str(trace)} if drawn_from_traces else {}),
    })  # fmt: skip
    # The engine decides which degrees `cluster.engines` may have; a simulation of vLLM with one degree never looks.
    assert read_by(simulate, config) | {"rollout.engine"} == effective(config, "simulate")


def test_slurm_scripts_read_what_the_table_says(tmp_path):
    from libra.cluster.slurm_jobs import scripts

    pytest.importorskip("dask_jobqueue")
    config = config_from_dict({})
    read = read_by(lambda config: scripts(config, tmp_path), config)
    # What is read beside the scripts: where they lie, how often the queue is looked at, and the scheduler's own page.
    beside = {"slurm.dir", "cluster.dashboard_port", "cluster.dashboard_names"}
    beside |= {"cluster.tool_workers_most"}
    assert read | beside == effective(config, "slurm")


def test_a_local_cluster_reads_what_the_table_says():
    from libra.cluster.local import worker_resources

    some = [{"tp": 1, "count": 1, "slots": 4}, {"tp": 1, "count": 1}]
    for cluster in ({}, {"engines": some}, {"engines": some[:1]}, {"rollout_workers": 2}, {"hybrid_workers": 1}):
        config = config_from_dict({"cluster": cluster})
        read = read_by(worker_resources, config) & {"rollout.slots"}
        assert read == effective(config, "run") & {"rollout.slots"}, cluster
    alike = config_from_dict({})
    assert {"cluster.tool_slots", "cluster.tool_workers", "cluster.rollout_workers", "cluster.engines"} <= read_by(
        worker_resources, alike
    )


@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_an_engine_reads_what_the_table_says(engine, tiny_model):
    from libra.worker.engine.engine_factory import EngineKind, make_engine

    config = config_from_dict({"rollout": {"engine": engine}})
    looked_at = {"rollout.exact_logprobs", "rollout.keep_kv", *(name for name in READ if name.startswith("vllm."))}
    read = read_by(lambda config: make_engine(config, EngineKind(engine, 2), tiny_model), config)
    assert read & looked_at == effective(config, "run") & looked_at


@pytest.mark.parametrize("name", POLICIES)
def test_an_ordering_has_the_settings_that_the_table_says(name):
    from libra.policy import make_ordering

    read = effective(config_from_dict({"policy": {"name": name}}), "run")
    same = make_ordering(name).snapshot()
    assert (make_ordering(name, objective="stream").snapshot() != same) == ("policy.objective" in read)
    assert (make_ordering(name, patience=3).snapshot() != same) == ("policy.patience" in read)
