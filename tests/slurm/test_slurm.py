"""The quick start through a real Slurm: sbatch, squeue and scancel of Debian, fake GPUs, TLS."""

import json
import os
import subprocess
import sys
import tempfile
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from distributed import Client
from distributed.security import Security

import single_node
from libra.cluster.connection import Contact, connect, present_workers
from libra.cluster.slurm_jobs import CONTACT_FILE
from libra.config import load_config
from libra.errors import ClusterError

REPOSITORY = Path(__file__).parents[2]
SUPPORT = REPOSITORY / "tests" / "support"
LIBRA = [sys.executable, "-c", "from libra.cli.main import main; main()"]

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(single_node.missing()), reason=f"no Slurm here: {single_node.missing()}"),
]


@dataclass
class Slurm:
    directory: Path
    environment: dict[str, str]

    def libra(self, *arguments):
        where = {"env": self.environment, "cwd": self.directory}
        return subprocess.run([*LIBRA, *arguments], **where, capture_output=True, text=True)

    def jobs(self):
        return dict(json.loads((self.directory / "slurm" / "jobs.json").read_text()))

    def queue(self):
        command = ["squeue", "-h", "-o", "%j"]
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def slurm():
    with (
        tempfile.TemporaryDirectory(prefix="libra-slurm-") as name,
        single_node.single_node_slurm(Path(name)) as environment,
    ):
        environment |= {"PYTHONPATH": os.pathsep.join(filter(None, [str(REPOSITORY), environment.get("PYTHONPATH")]))}
        job = {"cpus": 1, "memory": "2 GiB", "walltime": "00:20:00"}
        settings = {
            "extends": "libra/quickstart",
            "cluster": {"dashboard_port": 0, "threads": 1, "engines": [{"slots": 128}, {"slots": 32}]}, "slurm": {
            "host": "127.0.0.1", "setup": [f"export PYTHONPATH={environment['PYTHONPATH']}"], "jobs": {
            "rollout": {**job, "partition": "rollout", "gpus": 1},
            "train": {**job, "partition": "train", "gpus": 1}, "tool": {**job, "partition": "train"},}},
        }  # fmt: skip
        (Path(name) / "my.yaml").write_text(yaml.safe_dump(settings))
        yield Slurm(Path(name), environment)


def until(condition, what, step):
    for _ in range(200):
        if condition():
            return
        step()
    raise AssertionError(what)


@pytest.fixture(scope="module")
def mine(slurm):
    """``my.yaml`` is up; its contact file. The last test that uses it takes it down."""
    up = slurm.libra("cluster", "slurm", "my.yaml", "up")
    assert up.returncode == 0, up.stderr
    contact = slurm.directory / "slurm" / CONTACT_FILE
    yield contact
    if contact.exists():
        slurm.libra("cluster", "slurm", "my.yaml", "down")


def test_nobody_without_the_key_gets_in(slurm, mine):
    contact = Contact.read(mine)
    assert Path(contact.key_file).stat().st_mode & 0o077 == mine.stat().st_mode & 0o077 == 0
    with pytest.raises(ClusterError):
        connect(contact.address)
    unencrypted = contact.address.replace("tls://", "tcp://")
    for address, security in ((unencrypted, None), (contact.address, Security.temporary())):
        with pytest.raises((OSError, TimeoutError)):
            Client(address, security=security, timeout=3)
    again = slurm.libra("cluster", "slurm", "my.yaml", "up")
    assert again.returncode == 2 and "already up" in again.stderr


def test_the_quick_start_runs_through_slurm_and_survives_scancel(slurm, mine):
    with _client(mine) as client:
        client.wait_for_workers(4, timeout=120)
        visible = client.run(lambda: os.environ.get("CUDA_VISIBLE_DEVICES"))
        gpus = {name: visible[address] for address, name in _names(client).items()}
    assert len({gpus["rollout-0"], gpus["rollout-1"], gpus["train-0"]} - {None}) == 3
    assert gpus["tool-0"] is None

    first = slurm.jobs()
    run = subprocess.Popen(
        [*LIBRA, "run", "my.yaml", "--scheduler", "slurm/cluster.json", "run.name=s", "run.iterations=6",
         "evaluation.prompts=0"],
        env=slurm.environment, cwd=slurm.directory, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert run.stdout is not None
    asked = None
    for line in run.stdout:
        if line.startswith("iteration 0") and asked is None:
            asked = slurm.libra("roles", "runs/s")  # through the certificates of the cluster that the run was given
            subprocess.run(["scancel", first["rollout-1"]], env=slurm.environment, check=True)
    _, errors = run.communicate()
    assert run.returncode == 0, errors
    assert asked is not None and asked.returncode == 0, asked
    assert not (slurm.directory / "runs/s/scheduler.json").exists()
    metrics = [json.loads(row) for row in (slurm.directory / "runs/s/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in metrics if "reward" in row] == list(range(6))

    with _client(mine) as client:
        client.wait_for_workers(4, timeout=120)
    before = (None, first["rollout-1"])
    until(lambda: slurm.jobs().get("rollout-1") not in before, "it was not submitted again", slurm.queue)
    status = slurm.libra("cluster", "slurm", "my.yaml", "status")
    assert "2 rollout, 1 train, 1 tool workers connected" in status.stdout
    assert slurm.jobs()["train-0"] == first["train-0"]
    down = slurm.libra("cluster", "slurm", "my.yaml", "down")
    assert down.returncode == 0 and not mine.exists(), down.stderr
    until(lambda: "libra-" not in slurm.queue(), "jobs are left in the queue", slurm.queue)
    assert "Traceback" not in (slurm.directory / "slurm/logs/scheduler.log").read_text()
    assert slurm.libra("cluster", "slurm", "my.yaml", "status").returncode == 2


def test_each_kind_of_engine_has_jobs_of_its_own_and_a_run_is_told_where_they_are_not_what_it_lists(slurm):
    cluster = {"engines": [{"tp": 1, "slots": 16}, {"tp": 2, "slots": 4}], "dashboard_port": 0, "threads": 1}
    kinds = {"extends": "my.yaml", "rollout": {"engine": "vllm"}, "cluster": cluster}
    (slurm.directory / "kinds.yaml").write_text(yaml.safe_dump(kinds))
    up = slurm.libra("cluster", "slurm", "kinds.yaml", "up")
    assert up.returncode == 0, up.stderr
    try:
        contact = slurm.directory / "slurm" / "cluster.json"
        with _client(contact) as client:
            client.wait_for_workers(4, timeout=120)
            workers = present_workers(client)
            supply = {str(worker["name"]): worker["resources"] for worker in workers.values()}
            visible = client.run(lambda: os.environ.get("CUDA_VISIBLE_DEVICES", ""))
            gpus = {name: visible[address].split(",") for address, name in _names(client).items()}
        assert supply["rollout-0"] == {"ROLLOUT": 16, "TP": 1, "THREADS": 1, "GPU": 1}
        assert supply["rollout-1"] == {"ROLLOUT": 4, "TP": 2, "THREADS": 1, "GPU": 2}
        assert (len(gpus["rollout-0"]), len(gpus["rollout-1"])) == (1, 2)
        assert len({*gpus["rollout-0"], *gpus["rollout-1"], *gpus["train-0"]}) == 4
        jobs = slurm.jobs()
        command = ["squeue", "-h", "-o", "%i %C", "--jobs", f"{jobs['rollout-0']},{jobs['rollout-1']}"]
        asked = subprocess.run(command, env=slurm.environment, capture_output=True, text=True, check=True).stdout
        cores = dict(line.split() for line in asked.splitlines())
        assert (cores[jobs["rollout-0"]], cores[jobs["rollout-1"]]) == ("1", "2")
        other = slurm.libra("run", "my.yaml", "--scheduler", "slurm/cluster.json", "run.name=other")
        assert other.returncode == 2
        assert "type cluster.engines=[]" in other.stderr and "Traceback" not in other.stderr
    finally:
        slurm.libra("cluster", "slurm", "kinds.yaml", "down")


def test_tool_workers_come_as_jobs_where_actions_wait_and_leave_the_queue_where_they_idle(slurm, random_model):
    workers = slurm.directory / "workers"
    workers.mkdir()
    elastic = {
        "extends": "my.yaml", "run": {"name": "elastic", "iterations": 1}, "model": {"path": str(random_model)},
        "environment": {"name": "wants_two:WantsTwo", "args": {"path": str(workers)}},
        "rollout": {"max_turns": 2, "max_new_tokens": 4, "ignore_eos": True},
        "trainer": {"prompts": 2, "group_size": 3, "lr": 0.0}, "evaluation": {"prompts": 0},
        "cluster": {"engines": [], "tool_supply": {"cores": 1}, "tool_workers_most": 2},
        "slurm": {"setup": [f"export PYTHONPATH={slurm.environment['PYTHONPATH']}:{SUPPORT}"]},
    }  # fmt: skip
    file = slurm.directory / "elastic.yaml"
    file.write_text(yaml.safe_dump(elastic))
    slurm.environment["PYTHONPATH"] += f":{SUPPORT}"
    contact = slurm.directory / "slurm" / CONTACT_FILE
    with _quick_pools(slurm, file) as process:
        with _client(contact) as client:
            client.wait_for_workers(3, timeout=120)
            first = set(_names(client).values())
            run = slurm.libra("run", "elastic.yaml", "--scheduler", str(contact))
            assert run.returncode == 0, run.stderr
            assert len(list(workers.iterdir())) == 2  # two workers had actions
            until(lambda: "tool-1" not in slurm.jobs(), "an idle worker has its job", lambda: _pause(process))
            until(lambda: "tool-1" not in slurm.queue(), "its job is left in the queue", lambda: _pause(process))
            assert first == {"rollout-0", "train-0", "tool-0"} == set(_names(client).values())
        events = (slurm.directory / "runs/elastic/events.jsonl").read_text().splitlines()
        orders = [row for row in map(json.loads, events) if row["name"] == "tool_workers_ordered"]
        assert orders[0]["ordered"] == 2 and "wait" in orders[0]["reason"]
    until(lambda: "libra-" not in slurm.queue(), "jobs are left in the queue", slurm.queue)


def _pause(process):
    """Until it has ended, or for a moment."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(0.3)


@contextmanager
def _quick_pools(slurm, file):
    """A cluster whose tool workers come and go quickly; yields its process."""
    directory = slurm.directory / "slurm"
    contact, settings = directory / CONTACT_FILE, directory / "config.json"
    directory.mkdir(exist_ok=True)
    settings.write_text(json.dumps(load_config(file).model_dump(mode="json")))
    command = [sys.executable, str(Path(__file__).with_name("quick_pools.py")), str(settings), str(directory)]
    with (directory / "quick.log").open("wb") as log:
        process = subprocess.Popen(command, env=slurm.environment, stdout=log, stderr=log)
    try:

        def there():
            return process.poll() is not None or (contact.exists() and (directory / "jobs.json").exists())

        until(there, "the cluster did not start", lambda: _pause(process))
        assert process.poll() is None, (directory / "quick.log").read_text()
        yield process
    finally:
        process.terminate()
        process.wait(60)


def _client(path):
    contact = Contact.read(path)
    return Client(contact.address, security=contact.security(), timeout=30, set_as_default=False)


def _names(client):
    return {address: str(w["name"]) for address, w in present_workers(client).items()}
