"""Jobs and Slurm's answers: sbatch, squeue and scancel are small scripts here, which emulate those of a site."""

import asyncio
import os

import pytest

from libra.cluster import slurm_service
from libra.cluster.slurm_jobs import OwnJob
from libra.config import config_from_dict
from libra.errors import ClusterError

pytestmark = pytest.mark.live
BANNER = "Welcome! Up since 2026, 41 nodes\n"
OURS = "Submitted batch job 519605"


@pytest.fixture
def site(tmp_path, monkeypatch):
    def install(sbatch=""):
        for name, body in (("sbatch", sbatch), ("squeue", ""), ("scancel", f"echo $* >> {tmp_path}/cancelled")):
            (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
            (tmp_path / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        return OwnJob("tls://h:1", "rollout-0", cores=1, memory="1GiB", processes=1, job_name="libra-rollout-0")

    return install


def test_the_number_read_is_that_of_our_job_or_the_answer_is_refused(site):
    for answer in ("519605", "519605;c", f"{BANNER}519605;c", f"{BANNER}{OURS}", f"{OURS} on cluster c\n4 left"):
        assert asyncio.run(site(f"echo '{answer}'")._submit_job("script")) == "519605"
    for answer in ("", "done", BANNER):
        with pytest.raises(ClusterError, match="libra-rollout-0"):
            asyncio.run(site(f"echo '{answer}'")._submit_job("script"))


def test_only_a_job_of_our_name_is_cancelled(site, tmp_path):
    ours = site()
    ours.job_id = "519605"
    asyncio.run(ours.close())
    assert (tmp_path / "cancelled").read_text().split() == ["--name=libra-rollout-0", "519605"]


def test_a_start_that_sbatch_refuses_ends_with_its_words(site, tmp_path):
    site("echo 'sbatch: error: --mem is not allowed here' >&2; exit 1")
    config = config_from_dict({"slurm": {"host": "127.0.0.1"}, "cluster": {"dashboard_port": 0}})
    with pytest.raises(ClusterError, match=r"--mem is not allowed here; .* slurm\.jobs\.\w+\.skip=\[--mem\]"):
        asyncio.run(slurm_service.serve(config, tmp_path))
    assert not (tmp_path / "cluster.json").exists()
