"""A run starts the layout that is planned for it: refused where it cannot be, told where it is, and reached while it goes on."""

import json
import re

import pytest
from deployments import configured_deployment, planned_deployment
from whole_run import events_of, named

from libra.cli.clusters import roles_command
from libra.cli.main import main
from libra.cluster.connection import FILE, present_workers
from libra.cluster.hardware_inventory import CPU, Machine
from libra.cluster.local import device_bindings
from libra.config import config_from_dict, load_config
from libra.config.load import RESOLVED_FILE
from libra.config.planner import PlannedEngines, PlannedLayout
from libra.driver.launch_layout import laid_out
from libra.driver.run_session import Session, run
from libra.errors import ClusterError, ConfigError, PlanError
from libra.planner.build_plan import plan
from libra.planner.from_config import shape_of, snapshot_of
from libra.planner.plan_settings import shape_digest, with_plan

LAPTOP, NODE = Machine(CPU, 0, 8), Machine("H100-80G", 4, 64)


def _config(**sections):
    given = {"model": {"path": "Qwen/Qwen3-4B"}, "planner": {"layout": "auto"}, "cluster": {"threads": 2}}
    for name, values in sections.items():
        given[name] = {**given.get(name, {}), **values}
    return config_from_dict(given)


def test_the_machines_own_gpus_are_planned_for():
    made = laid_out(_config(), NODE)
    layout = made.planner.planned
    assert layout is not None
    assert (layout.gpu, layout.num_gpus, made.planner.layout) == ("H100-80G", 4, "configured")
    assert "H100-80G, which this machine has" in layout.rests_on
    assert laid_out(made, NODE) is made  # what was planned is started as it is
    deployed = configured_deployment(made)
    assert deployed.train_gpus + sum(tp * number for tp, number in deployed.engines.items()) <= 4


@pytest.mark.parametrize("teacher", ["none", "own", "service"])
def test_a_judge_and_a_teacher_have_the_devices_that_they_were_planned_for(teacher):
    judge = {"model": "Qwen3-0.6B"} | ({"function": "teach"} if teacher == "service" else {})
    judged = {"model": {"path": "Qwen3-1.7B"}, "services": {"named": {"judge": judge}}}
    judged |= {"cluster": {"tool_workers": 2, "threads": 2}}
    own_teacher = teacher == "own"
    if teacher != "none":
        given = "Qwen3-0.6B" if own_teacher else {"service": "judge"}
        judged |= {"trainer": {"algorithm": "opd"}, "distil": {"teacher": given}}
    least = 3 if own_teacher else 2
    for machine, shares in ((NODE, False), (Machine("H100-80G", least, 64), True)):
        made = laid_out(_config(**judged), machine)
        bound = device_bindings(made, machine.num_gpus)
        deployed = configured_deployment(made)
        assert sum(len(gpus.split(",")) for name, gpus in bound.items() if "tool" not in name) == (
            deployed.train_gpus + sum(deployed.engines.values()) + own_teacher
        )
        others = {gpu for name, gpus in bound.items() if "tool" not in name for gpu in gpus.split(",")}
        assert teacher == "service" or bound["tool-0"] == bound["tool-1"]
        assert (bound["tool-0"] == bound[f"train-{deployed.train_gpus - 1}"]) == (bound["tool-0"] in others) == shares


def test_without_a_gpu_seconds_are_measured_ones_or_of_a_gpu_that_was_named():
    with pytest.raises(PlanError, match=r"planner\.calibration=FILE"):
        laid_out(_config(), LAPTOP)
    layout = laid_out(_config(planner={"layout": "auto", "gpu": "A800-80G"}), LAPTOP).planner.planned
    assert layout is not None
    assert (layout.gpu, layout.num_gpus) == (CPU, 4)  # ranks of two threads on eight cores
    assert "A800-80G, not this machine" in layout.rests_on


@pytest.mark.parametrize(("sections", "machine", "setting"), [
    ({"planner": {"num_gpus": 8}}, NODE, "planner.num_gpus"),
    ({"planner": {"gpu": "A800-80G"}}, NODE, "planner.gpu"),
    ({}, Machine("Unheard Of", 4, 8), "planner.gpu"),
    ({}, Machine("H100-80G", 1, 8), "planner.layout=configured"),
    ({"planner": {"gpu": "A800-80G"}, "cluster": {"threads": 8}}, LAPTOP, "planner.num_gpus=2"),
    ({"planner": {"gpu": "A800-80G", "num_gpus": 33}}, LAPTOP, "planner.num_gpus=32"),
    ({"planner": {"tp": [2]}}, NODE, "planner.tp"),
    ({"cluster": {"device": "cuda"}}, LAPTOP, "cluster.device"),
    ({"model": {"path": "Llama-2-70b"}}, NODE, "planner.tp"),
])  # fmt: skip
def test_a_plan_that_cannot_be_started_here_names_the_setting_to_change(sections, machine, setting):
    given = {**sections, "planner": {"layout": "auto", **sections.get("planner", {})}}
    with pytest.raises((PlanError, ConfigError), match=re.escape(setting)):
        laid_out(_config(**given), machine)


def test_engines_that_the_model_or_the_machine_cannot_have_are_refused():
    def listed(*engines):
        return _config(planner={"layout": "configured"}, rollout={"engine": "vllm"}, cluster={"engines": list(engines)})

    for engine in ({"tp": 3}, {"tp": 2, "count": 3}):  # heads do not divide; six GPUs of four
        with pytest.raises(ConfigError, match=r"cluster\.engines"):
            laid_out(listed(engine), NODE)
    there = listed({"tp": 2, "count": 2})
    assert laid_out(there, NODE) is there
    with pytest.raises(ConfigError, match=r"planner\.layout=configured"):
        laid_out(_config(), NODE, started_here=False)


def test_every_worker_has_gpus_of_its_own_where_there_are_enough():
    engines = {"engines": [{"tp": 2}, {"tp": 1}]}
    config = _config(planner={"layout": "configured"}, rollout={"engine": "vllm"}, cluster=engines)
    assert device_bindings(config, 4) == {"rollout-0": "0,1", "rollout-1": "2", "train-0": "3"}
    assert device_bindings(config, 3) == {}
    alike = _config(planner={"layout": "configured"}, cluster={"train_workers": 2})
    assert device_bindings(alike, 3) == {"rollout-0": "0", "train-0": "1", "train-1": "2"}
    assert device_bindings(alike, 2) == {"train-0": "1", "train-1": "0"}
    assert device_bindings(alike, 0) == {}
    with pytest.raises(ClusterError, match=r"cluster\.train_workers=1"):
        device_bindings(alike, 1)
    on_cpu = _config(planner={"layout": "configured"}, cluster={"train_workers": 2, "device": "cpu"})
    assert device_bindings(on_cpu, 1) == {}


@pytest.mark.live
@pytest.mark.timeout(600)
def test_a_run_starts_what_was_planned_and_answers_for_its_roles(make_config, capsys):
    def typed(*arguments):
        with pytest.raises(SystemExit) as stopped:
            main(list(arguments))
        told = capsys.readouterr()
        return int(stopped.value.code or 0), told.out, told.err

    planner = {
        "gpu": "A800-80G", "num_gpus": 3, "lengths": {"generated_p50_tokens": 60, "generated_p99_tokens": 200, "turns": 3},
        "fixed_engines": {1: 2},
    }  # fmt: skip
    config = make_config(run={"iterations": 1}, planner={"layout": "auto", **planner}, cluster={"hybrid_workers": 1})
    wanted = planned_deployment(plan(snapshot_of(config, None, what_if=False)[0]))
    assert wanted.engines == {1: 2}
    with Session(config) as session:  # the cluster is what is tested
        directory = session.directory
        workers = present_workers(session.client).values()
        supply = {str(worker["name"]): worker["resources"] for worker in workers}
        assert [name for name in sorted(supply) if name.startswith("rollout")] == ["rollout-0", "rollout-1"]
        assert [name for name in supply if name.startswith("train")] == [f"train-{i}" for i in range(wanted.train_gpus)]
        assert {has["ROLLOUT"] for name, has in supply.items() if name.startswith("rollout")} == {wanted.concurrency[1]}
        assert (directory / FILE).stat().st_mode & 0o077 == 0
        assert len(list(session.iterations())) == 1
        code, out, _ = typed("roles", str(directory), "rollout-0=train", "--wait", "--json")
        answer = json.loads(out)
        assert (code, answer["changed"], answer["generation"], answer["roles"][0]["role"]) == (0, True, 1, "train")
        code, _, err = typed("roles", str(directory), "rollout-7=train")
        assert code == 2 and "rollout-7" in err
    assert not (directory / FILE).exists()
    code, _, err = typed("roles", str(directory))
    assert code == 2 and f"libra resume {directory}" in err

    assert configured_deployment(load_config(directory / RESOLVED_FILE)) == wanted
    (told,) = named(events_of(directory), "layout_planned")
    assert (told["train_gpus"], told["engines"]) == (wanted.train_gpus, [[1, 2, wanted.concurrency[1]]])
    assert (told["gpu"], told["num_gpus"]) == ("cpu", 3)


def test_a_cluster_with_other_engines_than_are_listed_or_planned_is_refused(make_config, client, tmp_path):
    config = make_config(cluster={"engines": [{"slots": 8}, {"slots": 4, "count": 2}]})
    with pytest.raises(ClusterError, match="ROLLOUT=4,TP=1"):
        run(config, client=client)
    elsewhere = make_config(run={"name": "elsewhere"})
    plan_of_a_gpu = PlannedLayout(
        model="random", model_digest=shape_digest(shape_of(elsewhere)), gpu="A800-80G", num_gpus=2, train_gpus=1,
        engines=(PlannedEngines(tp=1, count=1, concurrency=8),), micro_batch_tokens=4096, step_s=1.0,
        rests_on="a datasheet", why="training",
    )  # fmt: skip
    with pytest.raises(PlanError, match="no GPU"):
        run(with_plan(elsewhere, plan_of_a_gpu), client=client)
    with pytest.raises(ConfigError, match=r"planner\.layout=configured"):
        run(make_config(run={"name": "auto"}, planner={"layout": "auto"}), client=client)
    assert not (tmp_path / "auto").exists()
    fits = make_config(run={"iterations": 1, "name": "fits"}, cluster={"engines": [{"slots": 8}]})
    with Session(fits, client=client) as session:
        with pytest.raises(ClusterError, match=r"cluster\.hybrid_workers=1"):
            roles_command(session.directory, ["rollout-0=train"])
        assert len(list(session.iterations())) == 1
