"""The parts in ``workflows/own_*.py`` fulfil their contracts, and parts that do not are refused in one line."""

import json

import numpy as np
import pytest
import torch

import libra
from libra.config import config_from_dict
from libra.errors import ConfigError, EngineError, ModelError
from libra.facts import TrajectoryParked
from libra.model_loader import PretrainedLoader, loader_of
from libra.named_parts import name_of, named_part
from libra.policy import Fifo
from libra.rollout.chat_format import load_chat_format
from libra.rollout.weight_loading import load_causal_lm
from libra.testing.engines import EngineContract
from libra.testing.parts import AdvantageContract, LoaderContract, LossContract, PolicyContract, ScheduleContract
from libra.train.logprobs import load_model
from libra.train.own_parts import check_advantage, check_loss, check_schedule
from libra.types import Phase
from libra.user_orderings import check_ordering, ordering_of
from libra.worker.engine.engine_factory import EngineKind, check_engine, check_own_engine, make_engine


class TestLoss(LossContract):
    name = "own_loss:one_sided"


class TestAdvantage(AdvantageContract):
    name = "own_loss:ranked"


class TestSchedule(ScheduleContract):
    name = "own_loss:cosine"


class TestLoader(LoaderContract):
    name = "own_loader:FrozenEmbedding"


class TestPolicy(PolicyContract):
    name = "own_policy:FewestTurnsFirst"


@pytest.mark.live
class TestEngine(EngineContract):
    def make_engine(self, model_dir, *, slots, max_context_tokens):
        return named_part("rollout.engine", "own_engine:RemembersGreedy")(
            model_dir, slots=slots, max_context_tokens=max_context_tokens, version=0, threads=1
        )


def test_an_engine_has_the_degrees_that_it_declares(random_model):
    name = "ranked_engine:RankedEngine"

    def configured(engine, tp, **cluster):
        rollout = {"engine": engine, "tp": tp}
        return config_from_dict({"model": {"path": str(random_model)}, "rollout": rollout, "cluster": cluster})

    config = configured(name, 2)
    check_engine(config)
    kind = EngineKind.of(config, {"ROLLOUT": 4})
    made = make_engine(config, kind, random_model)
    assert (kind.tp, kind.bucket, made.tp) == (2, f"{name}-tp2", 2)
    with pytest.raises(EngineError):
        EngineKind.of(config, {"ROLLOUT": 4, "TP": 4})
    for wrong in (configured(name, 4), configured(name, 1, engines=[{"tp": 4, "count": 1}])):
        with pytest.raises(ConfigError, match="tp_degrees"):
            check_engine(wrong)
    with pytest.raises(ConfigError, match=r"rollout\.tp"):
        check_engine(configured("own_engine:RemembersGreedy", 2))


# Parts with a fault, found here by their module's name.


class Fails(PretrainedLoader):
    def model(self, directory, *, dtype, attention):
        raise OSError("out of paper")

    def tokenizer(self, directory):
        raise OSError("out of paper")


def per_sequence(logp, old_logp, advantage, *, sequences, settings):
    return sequences.sum(-advantage * logp)


def detached(logp, old_logp, advantage, *, sequences, settings):
    return (-advantage * logp).detach()


def raising(logp, old_logp, advantage, *, sequences, settings):
    raise KeyError("clip")


def mixing(logp, old_logp, advantage, *, sequences, settings):
    return -(advantage - advantage.mean()) * logp


def divided_by_nothing(groups, *, settings):
    with np.errstate(all="ignore"):
        return [group.reward / (group.reward - group.reward[0]) for group in groups]


def backwards(step, *, settings):
    return -1.0


def silent(step, *, settings):
    return None


class Forgets(Fifo):
    def snapshot(self):
        return {"arrivals": 0, "order": {}}


class FailsLater(Fifo):
    def handle(self, event):
        if getattr(event, "quanta", 0) == 3:
            raise ZeroDivisionError("three")
        return super().handle(event)


class HalfAnEngine:
    def __init__(self, model_dir, slots, max_context_tokens, version):
        pass

    async def generate(self, request):
        pass


THIS = __name__


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    """pytest imports this file under a name of its own."""
    import sys

    monkeypatch.setitem(sys.modules, "faulty", sys.modules[THIS])


@pytest.mark.parametrize(("check", "name", "said"), [
    (check_loss, "own_los:one_sided", "cannot import 'own_los'"),
    (check_loss, "own_loss:onesided", "'one_sided'"),
    (check_loss, "faulty:THIS", "str"),
    (check_loss, "faulty:backwards", "old_logp"),
    (check_loss, "faulty:per_sequence", "shape"),
    (check_loss, "faulty:detached", "gradient"),
    (check_loss, "faulty:raising", "KeyError"),
    (check_advantage, "faulty:divided_by_nothing", "finite"),
    (check_advantage, "faulty:per_sequence", "old_logp"),
    (check_schedule, "faulty:backwards", "-1.0"),
    (check_schedule, "faulty:silent", "None"),
    (check_ordering, "faulty:HalfAnEngine", "policy.name"),
    (loader_of, "faulty:Forgets", "no method model"),
    (check_own_engine, "faulty:HalfAnEngine", "abort"),
])  # fmt: skip
def test_what_does_not_fit_is_refused_in_one_line(check, name, said):
    with pytest.raises(ConfigError) as caught:
        check(name)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_trainer_engine_and_tokenizer_come_from_the_loader_and_its_fault_is_named(random_model):
    name = "faulty:Fails"
    with pytest.raises(ModelError, match=name):
        load_model(random_model, torch.float32, name)
    with pytest.raises(ModelError, match=name):
        load_causal_lm(random_model, "float32", "sdpa", name)
    with pytest.raises(ModelError, match=name):
        load_chat_format(random_model, loader=name)
    for engine in ("transformers", "own_engine:RemembersGreedy"):
        config = config_from_dict({"model": {"path": str(random_model), "loader": name}, "rollout": {"engine": engine}})
        made = make_engine(config, EngineKind(engine, 2), random_model)
        assert made.settings.loader == name
    with pytest.raises(ConfigError, match=r"model\.loader"):
        config_from_dict({"model": {"loader": name}, "rollout": {"engine": "vllm"}})


def test_a_loss_that_mixes_sequences_and_a_policy_that_forgets_fail_their_contracts():
    loss, policy = LossContract(), PolicyContract()
    loss.name, policy.name = "faulty:mixing", "faulty:Forgets"
    loss.test_it_is_accepted_before_a_run()
    with pytest.raises(AssertionError):
        loss.test_it_does_not_depend_on_what_else_is_in_the_micro_batch()
    policy.test_every_trajectory_ends_and_a_second_run_decides_the_same()
    with pytest.raises(AssertionError):
        policy.test_it_goes_on_from_its_snapshot()


def test_a_policy_that_raises_is_replaced_by_the_order_of_arrival_and_its_snapshot_says_so():
    policy = ordering_of("faulty:FailsLater", patience=3)
    parked = [TrajectoryParked(key, 0, Phase.ROLLOUT, quanta) for quanta in (0, 3, 4) for key in "ab"]
    answers = [policy.handle(event)[0] for event in parked[:3]]
    fault = answers[2].reason
    assert "ZeroDivisionError" in fault and "ZeroDivisionError" not in answers[1].reason
    again = ordering_of("faulty:FailsLater")
    again.restore(json.loads(json.dumps(policy.snapshot())))
    for event in parked[3:]:
        answer = policy.handle(event)
        assert answer == again.handle(event)
        assert answer[0].reason == fault
    assert [policy.handle(event)[0].priority.order for event in parked[4:]] == [0, 1]


def test_a_function_is_given_as_it_is_if_workers_can_import_it(tmp_path):
    assert name_of("trainer.loss", TestLoss) == f"{THIS}:TestLoss"
    assert name_of("trainer.loss", "gspo") == "gspo"
    with pytest.raises(ConfigError, match="trainer__loss"):
        libra.train(trainer__loss=lambda logp, old, advantage: logp, run__dir=str(tmp_path))
    assert not any(tmp_path.iterdir())
