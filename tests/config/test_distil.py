"""Settings of distillation: what contradicts them, and where they have no effect."""

import pytest

from libra.cluster.local import device_bindings, num_threads, worker_resources
from libra.config import config_from_dict
from libra.config.effects import Situation, ignored_settings
from libra.config.service_devices import extra_draws, teacher_model

OPD = {"algorithm": "opd"}
REVERSE = {"teacher": "t", "estimator": "sampled", "divergence": "reverse"}

SERVICES = {"named": {"judge": {"model": "m"}, "teacher": {"model": "m", "function": "teach", "max_batch": 2}}}


@pytest.mark.parametrize("command", ["plan", "simulate", "slurm"])
def test_an_algorithm_that_is_typed_is_read_with_what_it_sets_and_needs(command):
    situation = Situation(command, frozenset({"trainer.algorithm"}))

    def ignored(algorithm, **given):
        config = config_from_dict({"trainer": {"algorithm": algorithm}} | given)
        return "trainer.algorithm" in {each.field for each in ignored_settings(config, situation)}

    assert not ignored("opd", distil={"teacher": "Qwen3-8B"})
    assert ignored("gspo")  # of what it sets only a run reads what differs
    assert ignored("ppo_decoupled") == (command != "plan")  # which reads trainer.old_logp


def test_the_teacher_has_a_worker_of_its_own_and_a_gpu():
    config = config_from_dict({"trainer": OPD, "distil": {"teacher": "t"}})
    assert worker_resources(config)["teacher-0"] == {"TEACHER": 1}
    assert device_bindings(config, 3) == {"rollout-0": "0", "train-0": "1", "teacher-0": "2"}
    jobs = worker_resources(config, {"rollout": 1, "train": 1, "tool": 2})
    assert {name for name, supply in jobs.items() if "TEACHER" in supply} == {"tool-0"}
    assert not any("TEACHER" in supply for supply in worker_resources(config_from_dict({})).values())


def test_a_teacher_that_is_a_service_lives_on_the_first_tool_worker():
    config = config_from_dict({"trainer": OPD, "distil": {"teacher": {"service": "teacher"}}, "services": SERVICES})
    assert teacher_model(config) == "m"
    workers = worker_resources(config)
    assert {name: supply["TEACHER"] for name, supply in workers.items() if "TEACHER" in supply} == {"tool-0": 2}
    without = {**workers["tool-0"], "TEACHER": 0}
    # a group that waits for its scores takes a thread
    assert num_threads(workers["tool-0"]) == num_threads(without) + 2
    alone = {"rollout-0": "0", "train-0": "1"}
    assert device_bindings(config, 3) == alone | {"tool-0": "2"}
    assert device_bindings(config, 2) == alone | {"tool-0": "1"}  # it shares the training worker's
    assert device_bindings(config, 1) == {}


def test_an_engine_draws_beside_the_generated_token_only_what_the_reverse_divergence_needs():
    assert extra_draws(config_from_dict({"trainer": OPD, "distil": REVERSE | {"tokens": 8}})) == 7
    for change in ({"divergence": "forward"}, {"estimator": "top_k"}):
        assert extra_draws(config_from_dict({"trainer": OPD, "distil": REVERSE | {"tokens": 8} | change})) == 0
