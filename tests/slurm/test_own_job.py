"""Jobs and Slurm's answers: sbatch, squeue and scancel are small scripts here, which emulate those of a site."""

import asyncio
import os

import pytest

from libra.cluster.slurm import service_process
from libra.cluster.slurm.own_job import OwnJob
from libra.config import config_from_dict
from libra.errors import ClusterError

pytestmark = pytest.mark.live
QUEUE = {"41": "libra-rollout-0", "519605": "libra-rollout-0", "2026": "theirs"}
"""Names of jobs by number; a number is known to the emulated squeue if it is here."""
BANNER = "Welcome! Up since 2026, 41 nodes\n2026\n"


@pytest.fixture
def site(tmp_path, monkeypatch):
    def install(answer="", code=0, error=""):
        names = "".join(f'[ "$4" = --jobs={job} ] && echo {name}\n' for job, name in QUEUE.items())
        for name, body in (
            ("sbatch", f"cat <<'E'\n{answer}\nE\necho '{error}' >&2; exit {code}"), ("squeue", names + "true"),
            ("scancel", f"echo $1 >> {tmp_path}/cancelled"),
        ):  # fmt: skip
            (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
            (tmp_path / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        return tmp_path / "cancelled"

    return install


def job():
    return OwnJob(
        "tls://h:1", name="rollout-0", cores=1, memory="1GiB", processes=1, job_name="libra-rollout-0",
        log_directory=None, python="python",
    )  # fmt: skip


@pytest.mark.parametrize("answer", [
    "519605", "519605;cluster", BANNER + "519605", BANNER + "519605;c\n2026", BANNER + "Submitted batch job 519605",
    "Submitted batch job 519605 on cluster c\nLeft: 41 hours", "519605\n7",
])  # fmt: skip
def test_the_number_read_is_that_of_our_job(site, answer):
    site(answer)
    assert asyncio.run(job()._submit_job("script")) == "519605"


@pytest.mark.parametrize("answer", ["", "done", BANNER, "2026\nthanks"])
def test_an_answer_without_our_job_is_refused(site, answer):
    site(answer)
    with pytest.raises(ClusterError, match="libra-rollout-0"):
        asyncio.run(job()._submit_job("script"))


def test_only_a_job_of_our_name_is_cancelled(site):
    cancelled = site()
    for number in ("2026", "7", "519605"):
        ours = job()
        ours.job_id = number
        asyncio.run(ours.close())
    assert cancelled.read_text().split() == ["519605"]


def test_a_start_that_sbatch_refuses_ends_with_its_words(site, tmp_path):
    site(code=1, error="sbatch: error: --mem is not allowed here")
    config = config_from_dict({"slurm": {"host": "127.0.0.1"}, "cluster": {"dashboard_port": 0}})
    with pytest.raises(ClusterError, match=r"--mem is not allowed here; .* slurm_\w+\.skip=\[--mem\]"):
        asyncio.run(service_process.serve(config, tmp_path))
    assert not (tmp_path / "cluster.json").exists()
