"""The steps of the Dockerfiles, run in a root of Debian's packages without a Docker engine (debootstrap and chroot).

The base image, python:3.11-bookworm, is Debian 12 with a Python 3.11; the root is Debian 12 with its own Python 3.11 and nothing
else that an image would not have. COPY, ENV, WORKDIR, RUN and CMD are read from the files and carried out as Docker would, but for:

* torch: what the index of Dockerfile.cpu offers where that can be reached, else what pip finds here (PIP_FIND_LINKS), and never the
  build with CUDA: there the test fails before it begins to load gigabytes;
* `make setup-vllm-cuda` of Dockerfile.cuda: `make -n`, which says what would be run; vLLM for GPUs is gigabytes too;
* CMD: one small iteration of that run.

It takes minutes and the network, so it runs where LIBRA_IMAGE_STEPS=1 asks for it.
"""

import json
import os
import shlex
import shutil
import subprocess
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

import pytest

PACKAGES = "python3,python3-venv,make,ca-certificates"
SMALL = [
    "run.iterations=1", "trainer.prompts=2", "trainer.group_size=2", "evaluation.prompts=0", "cluster.dashboard_port=0",
]  # fmt: skip
NOT_RUN = "setup-vllm-cuda"


def missing():
    """Why the steps cannot be run here; empty where they can."""
    if os.environ.get("LIBRA_IMAGE_STEPS") != "1":
        return "takes minutes and the network; type: LIBRA_IMAGE_STEPS=1 python -m pytest tests/docker"
    if os.geteuid() != 0:
        return "needs root, for chroot"
    lacking = [name for name in ("debootstrap", "unshare", "chroot") if shutil.which(name, path=_path()) is None]
    return f"no {', '.join(lacking)}; type: apt-get install debootstrap util-linux" if lacking else ""


def _path():
    return f"{os.environ['PATH']}:/usr/sbin:/sbin"


pytestmark = [pytest.mark.images, pytest.mark.skipif(bool(missing()), reason=missing()), pytest.mark.timeout(1500)]


@dataclass
class Image:
    """What the instructions so far have made: a root, its environment and its directory."""

    root: Path
    environment: dict[str, str] = field(default_factory=dict)
    directory: str = "/"

    def run(self, words):
        """What a command in the root printed; AssertionError where it failed. Its mounts end with it."""
        binds = [place for place in self._of_pip() if not place.startswith(("/usr", "/etc"))]
        lines = [f"mount -t proc proc {self.root}/proc", f"mount -t tmpfs tmpfs {self.root}/dev/shm"]
        for place in binds:
            inside = f"{self.root}{place}"
            Path(inside).mkdir(parents=True, exist_ok=True)
            lines.append(f"mount --bind {shlex.quote(place)} {shlex.quote(inside)}")
        inner = f"cd {shlex.quote(self.directory)} && exec {shlex.join(words)}"
        lines.append(f"exec chroot {self.root} /bin/sh -c {shlex.quote(inner)}")
        command = ["unshare", "--mount", "--pid", "--fork", "sh", "-ec", "\n".join(lines)]
        environment = {"HOME": "/root", **self._pip(), **self.environment}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{words}: {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout + done.stderr

    def _pip(self):
        return {name: value for name, value in os.environ.items() if name.startswith("PIP_")}

    def _of_pip(self):
        """Directories that pip's settings of this machine name."""
        values = [part.removeprefix("file://") for value in self._pip().values() for part in value.split()]
        return [value for value in values if value.startswith("/") and Path(value).is_dir()]


@dataclass(frozen=True)
class Instruction:
    name: str
    rest: str


def instructions(text):
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [Instruction(*line.split(maxsplit=1)) for line in lines]


def copied(repository, target):
    """What ``COPY . .`` brings: the tree without what .dockerignore names, as git has it."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(listed, cwd=repository, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in filter(None, names):
        source, place = repository / name, target / name
        if source.is_file():
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, place)


def reachable(address):
    try:
        with urllib.request.urlopen(address, timeout=10):
            return True
    except OSError:
        return False


def carried_out(image, repository, instruction):
    """Do one instruction; what it printed."""
    match instruction.name:
        case "FROM":
            assert instruction.rest == "python:3.11-bookworm"
            version = image.run(["python3", "-c", "import sys; print(sys.version_info[:2])"])
            assert version.strip() == "(3, 11)", version
        case "WORKDIR":
            image.directory = instruction.rest
            (image.root / instruction.rest.lstrip("/")).mkdir(parents=True, exist_ok=True)
        case "COPY":
            assert instruction.rest == ". ."
            copied(repository, image.root / image.directory.lstrip("/"))
        case "ENV":
            for pair in shlex.split(instruction.rest):
                name, _, value = pair.partition("=")
                image.environment[name] = value.replace("$PATH", image.environment.get("PATH", ""))
        case "RUN":
            return image.run(run_words(instruction.rest))
        case "CMD":
            return image.run([*json.loads(instruction.rest), *SMALL])
        case _:
            raise AssertionError(f"{instruction}: an instruction that this test does not know")
    return ""


def run_words(rest):
    """The words of a RUN, with what the head of this file says in place of what is too large or out of reach."""
    words = shlex.split(rest)
    if NOT_RUN in words:
        return ["make", "-n", *words[1:]]
    return [word for word in words if not word.startswith("TORCH_INDEX=") or reachable(word.partition("=")[2])]


@pytest.fixture(scope="module")
def bare_root(tmp_path_factory):
    """Debian 12 with Python, make and certificates."""
    root = tmp_path_factory.mktemp("image")
    words = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", str(root)]
    done = subprocess.run(words, capture_output=True, text=True, env=os.environ | {"PATH": _path()})
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    for name in ("etc/resolv.conf", "etc/ssl/certs/ca-certificates.crt"):
        if (Path("/") / name).is_file():
            shutil.copy(Path("/") / name, root / name)
    yield root
    shutil.rmtree(root, ignore_errors=True)


def test_the_steps_of_both_images_go_through(bare_root, repository):
    path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    for name in ("Dockerfile.cpu", "Dockerfile.cuda"):  # one after the other: the second finds what the first installed
        image = Image(bare_root, {"PATH": path})
        said = {}
        for instruction in instructions((repository / "docker" / name).read_text()):
            if instruction.name == "RUN" and "make setup " in instruction.rest and name == "Dockerfile.cpu":
                offered = ["python3", "-m", "venv", "/tmp/look"], ["/tmp/look/bin/pip", "download", "--no-deps", "-qq"]
                image.run(offered[0])
                words = [word.partition("=") for word in run_words(instruction.rest)]
                index = [value for name, _, value in words if name == "TORCH_INDEX"]
                extra = ["--extra-index-url", index[0]] if index else []
                image.run([*offered[1], *extra, "--dest", "/tmp/look", "--no-cache-dir", "torch==2.13.0"])
                (wheel,) = (bare_root / "tmp/look").glob("torch-*.whl")
                assert "+cpu" in wheel.name, f"pip offers {wheel.name}, with CUDA: set PIP_FIND_LINKS or TORCH_INDEX"
            said[f"{instruction.name} {instruction.rest}"] = carried_out(image, repository, instruction)
        doctor = said["RUN libra doctor"]
        assert "torch" in doctor
        run = next(text for step, text in said.items() if step.startswith("CMD"))
        assert "iteration" in run or "reward" in run, run
        if name == "Dockerfile.cuda":
            (planned,) = (text for step, text in said.items() if NOT_RUN in step)
            assert ".[vllm]" in planned
            assert "constraints.txt" in planned
            assert image.environment["NVIDIA_VISIBLE_DEVICES"] == "all"
