"""Fixtures and rules that all tests share.

Rules, enforced here and explained in docs/contributing.md:

1. A test without a mark starts no process: it fails if it does. Marks say what a test needs, and each of them implies `live`.
2. Tests of one file run in one process (`--dist loadfile`), which starts each shared cluster at most once.
3. Hypothesis draws the same examples on every machine: 25 each, 200 with ``--hypothesis-profile=ci``.
"""

from __future__ import annotations

import asyncio
import os
import platform
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

import factories

if TYPE_CHECKING:
    from distributed import Client, Scheduler
    from distributed.deploy.cluster import Cluster

    from libra.config import RunConfig

_DEFAULTS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
for _name, _value in _DEFAULTS.items():
    os.environ.setdefault(_name, _value)

platform.processor()  # the first call starts `uname`, which Dask would do within a test

# A shell starts background jobs with Ctrl-C ignored, and processes of tests that are ended by it would inherit that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No deadline: the machine is shared. Derandomised: a red build is the change's doing, not the day's.
settings.register_profile("libra", deadline=None, derandomize=True, print_blob=True, max_examples=25)
settings.register_profile("ci", parent=settings.get_profile("libra"), max_examples=200)
settings.load_profile("libra")

SHARED_CLUSTERS = {
    "cluster": {"threads": 1},
    "cluster_wide": {"rollout_workers": 2, "hybrid_workers": 1, "train_workers": 2, "threads": 1},
}
"""Settings of `libra.config`'s section ``cluster`` for the two fixtures of these names."""
NEEDS = ("slurm", "vllm", "images", "install", "soak", "agents", "browser")
"""Marks that imply `live`, those whose tests take longest first: in that order they run."""
VLLM_FILES = ("test_engine_contract.py", "test_rebucket.py")
STARTS = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn")
"""Audit events of a process that starts."""

_started: list[str] = []


def _note_processes(event: str, arguments: tuple[Any, ...]) -> None:
    if event in STARTS:
        _started.append(f"{event} {str(arguments[0])[:80] if arguments else ''}")


sys.addaudithook(_note_processes)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """As ``--dist loadfile``, but all files with engines of vLLM in one process: two of them at once wait by spinning."""
    from xdist.scheduler import LoadFileScheduling

    class Files(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = str(super()._split_scope(nodeid))
            return "vllm" if file.endswith(VLLM_FILES) or "test_vllm" in file else file

    return Files(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Complete the marks, and bring forward what takes longest."""
    for item in items:
        shared = SHARED_CLUSTERS.keys() & set(getattr(item, "fixturenames", ()))
        if shared or any(item.get_closest_marker(name) for name in NEEDS):
            item.add_marker("live")

    def order(item: pytest.Item) -> int:
        return next((place for place, name in enumerate(NEEDS) if item.get_closest_marker(name)), len(NEEDS))

    items.sort(key=order)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Iterator[None]:
    """Forget the processes of the test before."""
    _started.clear()
    os.environ.pop("PYTEST_ADDOPTS", None)  # read already; not for a pytest that a test starts
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Fail a test that starts a process, itself or by a fixture, and is not marked `live`."""
    result = yield
    if _started and item.get_closest_marker("live") is None:
        pytest.fail(f"it starts a process ({_started[0]}) and is not marked live: docs/contributing.md", pytrace=False)
    return result


@pytest.fixture(scope="session")
def repository() -> Path:
    return Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a random two-layer Qwen3, a byte tokenizer and a chat template."""
    return factories.save_chat_model(tmp_path_factory.mktemp("random_model"))


@pytest.fixture(scope="session")
def random_moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random mixture of experts (Qwen3-MoE, two layers, two of eight experts) with the tokenizer of `random_model`."""
    return factories.save_chat_model(tmp_path_factory.mktemp("random_moe"), "qwen3_moe")


def _started_cluster(name: str) -> Iterator[Cluster]:
    from libra.cluster.local import local_cluster
    from libra.config import config_from_dict

    sections = {"cluster": SHARED_CLUSTERS[name] | {"dashboard_port": 0}, "rollout": {"slots": 8}}
    with local_cluster(config_from_dict(sections)) as started:
        yield started


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Three worker processes for all tests of a process: rollout-0, tool-0, train-0. A test leaves it as it found it."""
    yield from _started_cluster("cluster")


@pytest.fixture(scope="session")
def cluster_wide() -> Iterator[Cluster]:
    """Five: rollout-0, which can change its role, rollout-1, tool-0, train-0, train-1. A test leaves it as it found it."""
    yield from _started_cluster("cluster_wide")


@pytest.fixture(scope="session")
def client(cluster: Cluster) -> Iterator[Client]:
    """A client of `cluster`."""
    from distributed import Client

    with Client(cluster) as connected:
        yield connected


@pytest.fixture(scope="session")
def client_wide(cluster_wide: Cluster) -> Iterator[Client]:
    from distributed import Client

    with Client(cluster_wide) as connected:
        yield connected


@pytest.fixture(scope="session")
def needs_sandbox() -> None:
    from libra.envs.sandbox import unavailable

    if reason := unavailable():
        pytest.skip(f"no sandbox here: {reason}")


@pytest.fixture
def libra(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """``libra(*arguments)`` in this process: (exit code, standard output, standard error)."""

    from libra.cli.main import main

    def call(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stopped:
            main(list(map(str, arguments)))
        out, err = capsys.readouterr()
        assert isinstance(stopped.value.code, int)
        return stopped.value.code, out, err

    return call


@pytest.fixture
def make_episode() -> Callable[..., Any]:
    """Episode of one answering turn, or of the given turns."""
    from libra.types import EndReason, Episode, Turn

    def make(prompt: Any, answer: str = "", turns: Any = None) -> Episode:
        return Episode("train-0-0-0", prompt, turns if turns is not None else (Turn(answer),), EndReason.ANSWERED)

    return make


@pytest.fixture
def make_config(random_model: Path, tmp_path: Path) -> Callable[..., RunConfig]:
    """A small run's configuration; arguments are sections, laid over the defaults of `factories.run_settings`."""
    from libra.config import config_from_dict

    def make(**sections: dict[str, Any]) -> RunConfig:
        return config_from_dict(factories.run_settings(tmp_path, random_model, **sections))

    return make


@pytest.fixture(scope="session")
def until() -> Callable[[Any, Callable[[Scheduler], bool]], None]:
    """``until(cluster, condition)``: wait until the condition is true of the scheduler of a cluster in this process."""

    from distributed.diagnostics.plugin import SchedulerPlugin

    from libra.facts import STREAM_OP

    class Notices(SchedulerPlugin):
        """Sets an event whenever a task, a worker or a fact moves something in the scheduler, after Libra's plugin has seen it."""

        name = "test-notices"

        def __init__(self, scheduler: Scheduler) -> None:
            self.news = asyncio.Event()
            self.handlers = scheduler.stream_handlers
            self.told = self.handlers.get(STREAM_OP, lambda **message: None)
            self.handlers[STREAM_OP] = self.fact

        def fact(self, **message: Any) -> None:
            self.told(**message)
            self.news.set()

        def transition(self, *args: Any, **kwargs: Any) -> None:
            self.news.set()

        def add_worker(self, scheduler: Scheduler, worker: str) -> None:
            self.news.set()

        def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: Any) -> None:
            self.news.set()

    def wait(cluster: Any, condition: Callable[[Scheduler], bool]) -> None:
        async def look() -> None:
            scheduler = cluster.scheduler
            notices = Notices(scheduler)
            scheduler.add_plugin(notices, idempotent=False)
            try:
                while not condition(scheduler):
                    notices.news.clear()
                    await notices.news.wait()
            finally:
                scheduler.remove_plugin(notices.name)
                if notices.handlers[STREAM_OP] == notices.fact:
                    notices.handlers[STREAM_OP] = notices.told

        cluster.sync(look)

    return wait
