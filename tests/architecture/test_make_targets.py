"""The targets that the pages and CI name are in the Makefile, and make can plan each; that of Slurm starts where Slurm is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
IN_CODE = re.compile(r"```.*?```|`[^`\n]+`", re.DOTALL)
TARGET = re.compile(r"\bmake (?:[A-Z_]+=\S+ )*([a-z][a-z-]*)")


def named_targets() -> set[str]:
    """Targets in code on the pages, and in what CI runs."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    code = [part for page in pages for part in IN_CODE.findall(page.read_text())]
    script = [line for line in (ROOT / ".ci/run").read_text().splitlines() if not line.lstrip().startswith("#")]
    return {target for text in (*code, *script) for target in TARGET.findall(text)}


def planned(target: str) -> subprocess.CompletedProcess[str]:
    """What `make -n` prints for a target, with the environment of this Python taken as set up."""
    words = ["make", "-n", "-o", f"{sys.prefix}/.installed", target, f"VENV={sys.prefix}"]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("target", sorted(named_targets() | {"help", "clean"}))
def test_a_target_that_is_named_can_be_planned(target: str) -> None:
    assert re.search(rf"^{target}:.*## \S", (ROOT / "Makefile").read_text(), re.MULTILINE), (
        f"no target {target} with its help"
    )
    done = planned(target)
    assert done.returncode == 0 and done.stdout, done.stderr


def test_targets_are_found_on_pages_and_in_ci() -> None:
    assert {"quickstart", "setup-vllm-cuda", "kills", "check", "test", "test-slurm"} <= named_targets()
    assert TARGET.findall('LIBRA=1 make VENV="$place/venv" check; makes it, make SEED=0') == ["check"]
    assert planned("nothing").returncode != 0


def test_a_machine_that_has_slurm_gets_to_its_tests(tmp_path: Path) -> None:
    (check,) = (line for line in planned("test-slurm").stdout.splitlines() if "single_node" in line)
    for name in ("slurmctld", "slurmd", "sbatch", "munged", "mknod"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(check, shell=True, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    needed = "" if os.geteuid() == 0 else "test-slurm: a Slurm of one's own needs root\n"
    assert (done.returncode, done.stderr) == (bool(needed), needed)
