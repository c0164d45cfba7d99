"""A run starts the layout that is planned for it: refused where it cannot be, told where it is, and reached while it goes on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from distributed import Client

from libra.cli.main import main
from libra.cli.roles import roles_command
from libra.cluster.hardware_inventory import CPU, Machine
from libra.cluster.local import device_bindings, local_cluster
from libra.cluster.present_workers import present_workers
from libra.cluster.run_contact import FILE
from libra.config import RunConfig, config_from_dict, load_config
from libra.config.planner import PlannedEngines, PlannedLayout
from libra.config.resume_changes import RESOLVED_FILE, load_resumed
from libra.driver.launch_layout import laid_out
from libra.driver.session import Session, run
from libra.errors import ClusterError, ConfigError, PlanError
from libra.planner.build_plan import plan
from libra.planner.from_config import shape_of, snapshot_of
from libra.planner.plan_settings import configured_deployment, shape_digest, with_plan
from libra.planner.replan import Deployed
from libra.store.event_log import read_events

Config = Callable[..., RunConfig]
LAPTOP, NODE = Machine(CPU, 0, 8), Machine("H100-80G", 4, 64)


def _config(**sections: dict[str, object]) -> RunConfig:
    given = {"model": {"path": "Qwen/Qwen3-4B"}, "planner": {"layout": "auto"}, "cluster": {"threads": 2}}
    for name, values in sections.items():
        given[name] = {**given.get(name, {}), **values}  # type: ignore[dict-item]
    return config_from_dict(given)


# ------------------------------------------------------------------------------------------------ what is planned, and for what


def test_the_machines_own_gpus_are_planned_for() -> None:
    made = laid_out(_config(), NODE)
    layout = made.planner.planned
    assert layout is not None
    assert (layout.gpu, layout.num_gpus, made.planner.layout) == ("H100-80G", 4, "configured")
    assert "H100-80G, which this machine has" in layout.rests_on
    assert laid_out(made, NODE) is made  # what was planned is started as it is
    deployed = configured_deployment(made)
    assert deployed.train_gpus + sum(tp * number for tp, number in deployed.engines.items()) <= 4


def test_a_teacher_that_is_a_service_has_the_device_that_it_was_planned_for() -> None:
    taught = {
        "model": {"path": "Qwen3-1.7B"},
        "trainer": {"algorithm": "opd"},
        "distil": {"teacher": {"service": "oracle"}},
        "services": {"named": {"oracle": {"model": "Qwen3-0.6B", "function": "teach"}}},
    }
    for machine, shares in ((NODE, False), (Machine("H100-80G", 2, 64), True)):
        made = laid_out(_config(**taught), machine)
        bound = device_bindings(made, machine.num_gpus)
        used = [gpu for name, gpus in bound.items() if name != "tool-0" for gpu in gpus.split(",")]
        deployed = configured_deployment(made)
        assert len(used) == len(set(used)) == deployed.train_gpus + sum(deployed.engines.values())
        last = bound[f"train-{deployed.train_gpus - 1}"]
        assert (bound["tool-0"] == last) == (bound["tool-0"] in used) == shares, bound
    without = {name: values for name, values in taught.items() if name == "model"}
    ranks = {"planner": {"gpu": "H100-80G"}}
    layouts = [laid_out(_config(**given, **ranks), LAPTOP).planner.planned for given in (taught, without)]
    found = [(made.train_gpus, made.engines) for made in layouts if made is not None]
    assert len(found) == 2 and found[0] == found[1]  # on cores it takes no rank from them


@pytest.mark.parametrize("workers", [{"tool_workers": 2}, {"tool_workers": 1, "tool_workers_most": 2}])
def test_tool_workers_with_a_judge_have_a_gpu_in_their_environment(
    workers: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    judged = {
        "planner": {"layout": "configured"},
        "services": {"named": {"judge": {"model": "m"}, "counts": {"function": "math:sqrt"}}},
    }
    seen: dict[str, str | None] = {}

    class Started(Exception):
        pass

    def started(reserve: dict[str, Any] | None, least: int, *, workers: dict[str, Any], **_: Any) -> None:
        for name, spec in (workers | (reserve or {})).items():
            seen[name] = spec["options"]["env"].get("CUDA_VISIBLE_DEVICES")
        raise Started

    monkeypatch.setenv("LIBRA_FORK_SERVER", "0")
    monkeypatch.setattr("libra.cluster.local.dask.config.set", lambda *_: None)
    monkeypatch.setattr("libra.cluster.local.new_security", lambda: None)
    monkeypatch.setattr("libra.cluster.local.LocalWorkers", started)
    for num_gpus, gpu in ((3, "2"), (2, "1"), (1, None), (0, None)):
        monkeypatch.setattr("libra.cluster.local.this_machine", lambda n=num_gpus: Machine("H100-80G", n, 8))
        with pytest.raises(Started):
            local_cluster(_config(**judged, cluster=workers))  # type: ignore[arg-type]
        assert [seen[f"tool-{number}"] for number in range(2)] == [gpu, gpu]
        assert (seen["rollout-0"], seen["train-0"]) == (("0", "1") if num_gpus > 1 else (None, None))
    with pytest.raises(Started):
        local_cluster(_config(planner={"layout": "configured"}, cluster=workers))  # type: ignore[arg-type]
    assert seen["tool-0"] is None


@pytest.mark.parametrize("own_teacher", [False, True])
def test_a_judge_has_the_device_that_it_was_planned_for(own_teacher: bool) -> None:
    judged: dict[str, Any] = {
        "model": {"path": "Qwen3-1.7B"},
        "services": {"named": {"judge": {"model": "Qwen3-0.6B"}}},
        "cluster": {"tool_workers": 2, "threads": 2},
    }
    if own_teacher:
        judged |= {"trainer": {"algorithm": "opd"}, "distil": {"teacher": "Qwen3-0.6B"}}
    least = 3 if own_teacher else 2
    for machine, shares in ((NODE, False), (Machine("H100-80G", least, 64), True)):
        made = laid_out(_config(**judged), machine)
        snapshot, _ = snapshot_of(with_gpu(made, machine), None, what_if=False)
        planned = plan(snapshot)
        assert (planned.services_gpus, planned.teacher_gpus) == (int(not shares), int(own_teacher))
        bound = device_bindings(made, machine.num_gpus)
        deployed = configured_deployment(made)
        assert sum(len(gpus.split(",")) for name, gpus in bound.items() if "tool" not in name) == (
            deployed.train_gpus + sum(deployed.engines.values()) + own_teacher
        )
        others = {gpu for name, gpus in bound.items() if "tool" not in name for gpu in gpus.split(",")}
        assert bound["tool-0"] == bound["tool-1"]
        assert (bound["tool-0"] == bound[f"train-{deployed.train_gpus - 1}"]) == (bound["tool-0"] in others) == shares


def with_gpu(config: RunConfig, machine: Machine) -> RunConfig:
    """A configuration that is planned again for ``machine``."""
    planner = {"planned": None, "gpu": machine.gpu, "num_gpus": machine.num_gpus}
    return config.model_copy(update={"planner": config.planner.model_copy(update=planner)})


def test_without_a_gpu_seconds_are_measured_ones_or_of_a_gpu_that_was_named() -> None:
    with pytest.raises(
        PlanError, match=r"no GPU and was not measured.*planner\.calibration=FILE, or planner\.gpu=NAME"
    ):
        laid_out(_config(), LAPTOP)
    layout = laid_out(_config(planner={"layout": "auto", "gpu": "A800-80G"}), LAPTOP).planner.planned
    assert layout is not None
    assert (layout.gpu, layout.num_gpus) == (CPU, 4)  # ranks of two threads on eight cores
    assert "A800-80G, not this machine" in layout.rests_on
    more = laid_out(_config(planner={"layout": "auto", "gpu": "A800-80G", "num_gpus": 6}), LAPTOP).planner.planned
    assert more is not None
    assert "6 ranks of 2 threads share 8 cores" in more.rests_on


@pytest.mark.parametrize(
    ("sections", "machine", "message"),
    [
        (
            {"planner": {"num_gpus": 8}},
            NODE,
            r"planner\.num_gpus: a layout for 8 GPUs, and this machine has 4 x H100-80G",
        ),
        (
            {"planner": {"gpu": "A800-80G"}},
            NODE,
            r"planner\.gpu: A800-80G, and this machine has 4 x H100-80G.*=H100-80G",
        ),
        ({}, Machine("Unheard Of", 4, 8), r"planner\.gpu: Libra has no datasheet of this machine's GPU, 'Unheard Of'"),
        ({}, Machine("H100-80G", 1, 8), r"1 GPU cannot be divided.*planner\.layout=configured"),
        (
            {"planner": {"gpu": "A800-80G"}, "cluster": {"threads": 8}},
            LAPTOP,
            r"1 rank .* cannot be divided.*planner\.num_gpus=2",
        ),
        (
            {"planner": {"gpu": "A800-80G", "num_gpus": 33}},
            LAPTOP,
            r"planner\.num_gpus: 33 ranks, and this machine has 8 cores; type planner\.num_gpus=32",
        ),
        ({"planner": {"tp": [2]}}, NODE, r"planner\.tp: rollout\.engine=transformers runs TP degrees \[1\]"),
        ({"planner": {"gpu": "A8000"}}, LAPTOP, r"planner\.gpu: GPU 'A8000' is unknown; did you mean A800-80G"),
        ({"cluster": {"device": "cuda"}}, LAPTOP, r"cluster\.device: cuda, and this machine has no GPU .*=auto"),
        ({"model": {"path": "Llama-2-70b"}}, NODE, r"planner\.tp: no degree of .* holds the model"),
    ],
)
def test_a_plan_that_cannot_be_started_here_names_what_is_missing(
    sections: dict[str, dict[str, object]], machine: Machine, message: str
) -> None:
    given = {**sections, "planner": {"layout": "auto", **sections.get("planner", {})}}
    with pytest.raises((PlanError, ConfigError), match=message):
        laid_out(_config(**given), machine)


def test_engines_that_the_model_or_the_machine_cannot_have_are_refused() -> None:
    def listed(*engines: dict[str, int]) -> RunConfig:
        return _config(planner={"layout": "configured"}, rollout={"engine": "vllm"}, cluster={"engines": list(engines)})

    with pytest.raises(ConfigError, match=r"cluster\.engines: tp: got 3 for .*32 heads and 8 key-value heads"):
        laid_out(listed({"tp": 3}), NODE)
    with pytest.raises(
        ConfigError, match=r"cluster\.engines: its engines take 6 GPUs, and this machine has 4 x H100-80G"
    ):
        laid_out(listed({"tp": 2, "count": 3}), NODE)
    there = listed({"tp": 2, "count": 2})
    assert laid_out(there, NODE) is there
    with pytest.raises(ConfigError, match=r"uses a cluster with its own.*planner\.layout=configured"):
        laid_out(_config(), NODE, started_here=False)


def test_every_worker_has_gpus_of_its_own_where_there_are_enough() -> None:
    config = _config(
        planner={"layout": "configured"}, rollout={"engine": "vllm"}, cluster={"engines": [{"tp": 2}, {"tp": 1}]}
    )
    assert device_bindings(config, 4) == {"rollout-0": "0,1", "rollout-1": "2", "train-0": "3"}
    assert device_bindings(config, 3) == {}
    alike = _config(planner={"layout": "configured"}, cluster={"train_workers": 2})
    assert device_bindings(alike, 3) == {"rollout-0": "0", "train-0": "1", "train-1": "2"}
    assert device_bindings(alike, 2) == {"train-0": "1", "train-1": "0"}
    assert device_bindings(alike, 0) == {}
    with pytest.raises(
        ClusterError, match=r"2 replicas need a GPU each .*this machine has 1; type cluster\.train_workers=1"
    ):
        device_bindings(alike, 1)
    on_cpu = _config(planner={"layout": "configured"}, cluster={"train_workers": 2, "device": "cpu"})
    assert device_bindings(on_cpu, 1) == {}


# ------------------------------------------------------------------------------------------------ live


@pytest.mark.timeout(600)
def test_a_run_starts_what_was_planned_and_answers_for_its_roles(
    make_config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    def libra(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stopped:
            main(list(arguments))
        told = capsys.readouterr()
        return int(stopped.value.code or 0), told.out, told.err

    planner = {
        "gpu": "A800-80G",
        "num_gpus": 3,
        "generated_p50_tokens": 60,
        "generated_p99_tokens": 200,
        "turns": 3,
        "fixed_engines": {1: 2},
    }
    config = make_config(run={"iterations": 1}, planner={"layout": "auto", **planner}, cluster={"hybrid_workers": 1})
    wanted = Deployed.of(plan(snapshot_of(config, None, what_if=False)[0]))
    assert wanted.engines == {1: 2}
    with Session(config) as session:
        directory = session.directory
        workers = present_workers(session.client).values()
        supply = {str(worker["name"]): worker["resources"] for worker in workers}
        assert [name for name in sorted(supply) if name.startswith("rollout")] == ["rollout-0", "rollout-1"]
        assert [name for name in supply if name.startswith("train")] == [f"train-{i}" for i in range(wanted.train_gpus)]
        assert {has["ROLLOUT"] for name, has in supply.items() if name.startswith("rollout")} == {wanted.concurrency[1]}
        assert (directory / FILE).stat().st_mode & 0o077 == 0
        assert len(list(session.iterations())) == 1

        code, out, _ = libra("roles", str(directory), "--json")
        (row,) = json.loads(out)["roles"]
        assert (code, row["worker"], row["role"]) == (0, "rollout-0", "rollout")
        code, out, _ = libra("roles", str(directory), "rollout-0=train", "--wait")
        assert code == 0
        assert out.splitlines()[0] == "change 1 of run demo has ended"
        assert out.splitlines()[2].split()[:3] == ["rollout-0", "train", "1"]
        code, out, _ = libra("roles", str(directory), "rollout-0=rollout", "--wait", "--json")
        answer = json.loads(out)
        assert (code, answer["changed"], answer["generation"], answer["roles"][0]["role"]) == (0, True, 2, "rollout")
        code, _, err = libra("roles", str(directory), "rollout-7=train")
        assert code == 2
        assert "rollout-7" in err
        code, _, err = libra("roles", str(directory), "--cancel", "2")
        assert code == 2
        assert "Traceback" not in err
    assert not (directory / FILE).exists()
    code, _, err = libra("roles", str(directory))
    assert code == 2
    assert f"this run is not running, or has not started its first iteration; type libra resume {directory}" in err

    written = load_config(directory / RESOLVED_FILE)
    assert configured_deployment(written) == wanted
    (told,) = (e for e in read_events(directory / "events.jsonl").events if e["name"] == "layout_planned")
    assert (told["train_gpus"], told["engines"]) == (wanted.train_gpus, [[1, 2, wanted.concurrency[1]]])
    assert (told["gpu"], told["num_gpus"]) == ("cpu", 3)

    again = load_resumed(directory, ["planner.replan=true", "run.iterations=2", "cluster.hybrid_workers=0"])
    assert len(run(again, resume=True).iterations) == 1
    names = [event["name"] for event in read_events(directory / "events.jsonl").events]
    assert names.count("layout_planned") == 2
    assert "plan_considered" in names


def test_a_cluster_with_other_engines_than_are_listed_is_refused(
    make_config: Config, client: Client, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(cluster={"engines": [{"slots": 8}, {"slots": 4, "count": 2}]})
    wrong = r"2 engines of TP 1, 1 threads, 4 slots are listed, the cluster has 0; type.*ROLLOUT=4,TP=1"
    with pytest.raises(ClusterError, match=wrong), Session(config, client=client):
        pass
    elsewhere = make_config(run={"name": "elsewhere"})
    plan_of_a_gpu = PlannedLayout(
        model="random",
        model_digest=shape_digest(shape_of(elsewhere)),
        gpu="A800-80G",
        num_gpus=2,
        train_gpus=1,
        engines=(PlannedEngines(tp=1, count=1, concurrency=8),),
        micro_batch_tokens=4096,
        step_s=1.0,
        rests_on="a datasheet",
        why="training",
    )
    with pytest.raises(PlanError, match="the plan is for 2 x A800-80G, this cluster has no GPU"):
        run(with_plan(elsewhere, plan_of_a_gpu), client=client)
    with Session(make_config(run={"name": "alike"}), client=client) as session:
        roles_command(session.directory, ())
        assert "no worker of this run can change its role" in capsys.readouterr().out
        with pytest.raises(ClusterError, match=r"no worker of this run.*cluster\.hybrid_workers=1"):
            roles_command(session.directory, ["rollout-0=train"])
    summary = run(
        make_config(run={"iterations": 1, "name": "fits"}, cluster={"engines": [{"slots": 8}]}), client=client
    )
    assert len(summary.iterations) == 1
    with pytest.raises(ConfigError, match=r"planner\.layout=configured"):
        run(make_config(run={"name": "auto"}, planner={"layout": "auto"}), client=client)
    assert not (tmp_path / "auto").exists()
