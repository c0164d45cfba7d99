"""Job scripts are strings, so what would be submitted is tested without a Slurm."""

import pytest

from libra.cluster.local import number_of_workers, worker_resources
from libra.cluster.slurm_jobs import lost, scripts
from libra.config import config_from_dict
from libra.config.sections import SlurmSection
from libra.errors import ClusterError, ConfigError


def config(jobs={}, **more):  # noqa: B006
    return config_from_dict(
        {"rollout": {"slots": 32}, "cluster": {"rollout_workers": 2}, "slurm": {
            "host": "login1", "setup": ["module load cuda"],
            "jobs": {"rollout": {"partition": "gpu", "gpus": 4, "cpus": 16, "memory": "64 GiB"},
                     "train": {"directives": ["--exclusive"]}} | jobs,
        }, **more,}
    )  # fmt: skip


def test_every_worker_has_the_resources_of_its_role_and_one_commits():
    workers = worker_resources(config(), number_of_workers(config()))
    assert set(workers) == {"rollout-0", "rollout-1", "train-0", "tool-0"}
    assert workers["rollout-1"] == {"ROLLOUT": 32}
    assert worker_resources(config(cluster={"hybrid_workers": 1}))["rollout-0"] == {"ROLLOUT": 32, "HYBRID": 1}
    assert sum(resources.get("COMMIT", 0) for resources in workers.values()) == 1


def test_a_script_asks_slurm_for_what_the_section_says(tmp_path):
    made = scripts(config(), tmp_path)
    rollout = made["rollout-0"].splitlines()
    for line in ("-p gpu", "--cpus-per-task=16", "--mem=64G", "-t 04:00:00", "--gres=gpu:4"):
        assert f"#SBATCH {line}" in rollout
    assert rollout.index("module load cuda") < len(rollout) - 1
    assert "--name rollout-0 --nthreads 40 " in rollout[-1]
    assert "--resources ROLLOUT=32,GPU=4 " in rollout[-1]
    assert f"--tls-key {tmp_path}/tls/key.pem" in rollout[-1]
    assert "tls://login1:" in rollout[-1]
    assert "#SBATCH --exclusive" in made["train-0"]
    assert "gres" not in made["train-0"]
    skip = ["--mem", "--gres", "--time", "--ntasks"]
    less = config({"rollout": {"gpus": 4, "skip": skip}, "train": {"memory": "0.5 GiB"}})
    asked = scripts(less, tmp_path)["rollout-0"].partition("export")[0]
    assert not [option for option in ("--mem", "--gres", "-t ", "-n ") if option in asked]
    assert "#SBATCH --mem=512M" in scripts(less, tmp_path)["train-0"]


_NO_MEMORY = ["64", "64G", "0 GB", "0.0 TiB", "0.5 KB", "1023 KiB", "-1 GB", "inf", "nan GB", "٣ GB", "1e3 GB"]
_WRONG = {"walltime": ["4h"], "gpus": [-1], "partitions": ["x"], "skip": [["-J"]], "memory": [*_NO_MEMORY, True, 64]}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field in _WRONG for value in _WRONG[field]])
def test_a_wrong_value_names_the_field(field, value):
    with pytest.raises(ConfigError, match=rf"slurm\.jobs\.rollout\.{field}"):
        config({"rollout": {field: value}})


def test_a_job_that_ended_or_is_unknown_is_lost():
    states = {"1": ("RUNNING", "n1"), "2": ("PENDING", "(Resources)"), "3": ("TIMEOUT", ""), "4": ("CANCELLED", "")}
    assert lost(states, ["1", "2", "3", "4", "5"]) == ["3", "4", "5"]


ENGINES = [{"tp": 1, "count": 2, "slots": 48}, {"tp": 2, "threads": 3, "slots": 8}]


def test_each_kind_of_engine_is_a_kind_of_job_with_as_many_gpus_as_its_degree(tmp_path):
    job, cluster = {"gpus": 1, "cpus": 4, "memory": "3 GiB"}, {"train_workers": 2, "hybrid_workers": 1}
    rollout = {"engine": "vllm", "slots": 32}
    kinds = config({"rollout": job}, rollout=rollout, cluster={"engines": ENGINES} | cluster)
    workers = worker_resources(kinds, number_of_workers(kinds))
    assert set(workers) == {"rollout-0", "rollout-1", "rollout-2", "train-0", "train-1", "tool-0"}
    assert workers["rollout-0"] == {"ROLLOUT": 48, "TP": 1, "HYBRID": 1}
    assert workers["rollout-2"] == {"ROLLOUT": 8, "TP": 2, "THREADS": 3}
    made = scripts(kinds, tmp_path)
    for name, lines, supply in (
        ("rollout-1", ("--gres=gpu:1", "--cpus-per-task=4", "--mem=3G"), "--resources ROLLOUT=48,TP=1,GPU=1 "),
        ("rollout-2", ("--gres=gpu:2", "--cpus-per-task=8", "--mem=6G"), "--resources ROLLOUT=8,TP=2,THREADS=3,GPU=2 "),
    ):
        for line in lines:
            assert f"#SBATCH {line}" in made[name].splitlines(), made[name]
        assert supply in made[name]
    assert "export OMP_NUM_THREADS=3" in made["rollout-2"]
    assert "gres" not in scripts(kinds.model_copy(update={"slurm": SlurmSection()}), tmp_path)["rollout-2"]


def test_a_layout_that_is_yet_to_be_planned_is_refused(tmp_path):
    with pytest.raises(ClusterError, match="libra plan"):
        scripts(config(cluster={}, planner={"layout": "auto"}), tmp_path)
