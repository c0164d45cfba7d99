"""The services of one worker: shared by runs, verified before they answer, and never a wrong answer."""

import asyncio
import copy
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from factories import trajectory
from libra.cluster.device_lock import PAUSE_S, DeviceLock
from libra.config import config_from_dict
from libra.config.task_sections import DistilSection, ServiceEntry
from libra.envs.retries import BackOff
from libra.errors import ConfigError, ServiceFault, ServiceTimeout
from libra.train.teacher_model import Scoring, TeacherModel
from libra.types import TrajectoryId
from libra.worker.services.service_functions import FUNCTIONS
from libra.worker.services.service_host import RunServices, ServiceHost
from libra.worker.services.service_models import HostModel, ToTeach, scores_of

HERE = "asked_services"
ASKED = {"prompt": "What is it?", "completion": "It is so."}


def context(reports=None, **services):
    """A run on the worker."""
    config = config_from_dict({"services": services})
    spec = SimpleNamespace(config=config, run="demo", back_off=BackOff(0))
    return SimpleNamespace(spec=spec, name="tool-0", report=(reports if reports is not None else []).append)


@pytest.fixture
def host():
    return ServiceHost(torch.device("cpu"))


def told(reports):
    return [(each.service, each.restored, each.evicted) for each in reports]


async def test_runs_share_a_service_and_its_batches(random_model, host, made):
    entry = ServiceEntry(model=str(random_model), function="logprob", max_wait_s=0.05)
    reports = []
    runs = [context(reports, named={name: entry.model_dump()}) for name in ("mine", "yours")]

    for run in runs:
        host.share(run)
    names = [await host.load(entry) for _ in runs]
    answers = await asyncio.gather(*(host.answer(name, ASKED, run) for name, run in zip(names, runs, strict=True)))
    await host.unload(names[0], runs[0])
    answers.append(await host.answer(names[1], ASKED, runs[1]))
    await host.unload(names[1], runs[1])
    assert names[0] == names[1] and len(made) == 1 and len(set(answers)) == 1
    assert [(each.service, each.requests, each.restored) for each in reports] == [
        ("mine", 1, True), ("yours", 1, True), ("yours", 1, False),
    ]  # fmt: skip


@pytest.fixture
def made(monkeypatch):
    """Models that hosts have loaded."""
    made, init = [], HostModel.__init__

    def counted(self, *args, **more):
        made.append(self)
        init(self, *args, **more)

    monkeypatch.setattr(HostModel, "__init__", counted)
    return made


@pytest.mark.parametrize("part", ["model.layers.0.mlp.up_proj.weight", "model.norm.weight"])
async def test_a_copy_with_another_weight_never_answers(random_model, host, monkeypatch, part):
    entry = ServiceEntry(model=str(random_model), function="logprob", max_wait_s=0.0)
    run, whole = context(named={"judge": entry.model_dump()}), copy.deepcopy

    def torn(model, memo=None):
        made = whole(model, memo)
        if memo is not None:  # a part of the model
            return made
        with torch.no_grad():
            made.get_parameter(part).mul_(1.5)
        return made

    name = await host.load(entry)
    monkeypatch.setattr("libra.worker.services.service_models.copy.deepcopy", torn)
    with pytest.raises(ServiceFault, match="is not what was loaded"):
        await host.answer(name, ASKED, run)
    monkeypatch.setattr("libra.worker.services.service_models.copy.deepcopy", whole)
    assert np.isfinite(await host.answer(name, ASKED, run))  # it is restored again


async def test_batches_are_full_and_wrong_answers_and_a_run_that_ends_are_faults(host):
    short = ServiceEntry(function=f"{HERE}:short", max_wait_s=0.0)
    waits = ServiceEntry(function=f"{HERE}:lengths", max_batch=3, max_wait_s=60.0)
    reports = []
    run = context(reports, named={"short": short.model_dump(), "waits": waits.model_dump()})
    with pytest.raises(ServiceFault, match="for 1 inputs"):
        await host.answer(await host.load(short), ASKED, run)
    name = await host.load(waits)
    answers = await asyncio.gather(*(host.answer(name, {"completion": "x" * n}, run) for n in range(6)))
    assert answers == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert [each.requests for each in reports if each.service == "waits"] == [3, 3]
    asked = asyncio.ensure_future(host.answer(name, ASKED, run))
    await asyncio.sleep(0)
    await host.unload(name, run)
    with pytest.raises(ServiceFault, match="its run ends"):
        await asked


async def test_a_teacher_is_restored_when_it_is_asked_evicted_for_others_and_shared_by_runs(random_model, host, made):
    """Each run gets its own scores of the same model, those that a teacher on a worker of its own gives."""
    named = {
        "judge": {"model": str(random_model), "function": "logprob", "max_wait_s": 0.0},
        "teacher": {"model": str(random_model), "function": "teach", "max_wait_s": 0.0},
    }
    reports = []
    kinds, service = ((4, "top_k"), (8, "sampled")), {"service": "teacher"}
    settings = [DistilSection(teacher=service, tokens=k, estimator=e) for k, e in kinds]
    members = [trajectory(TrajectoryId(0, 0, n), lengths=(2, 3, 1, 1), seed=n, vocabulary=32) for n in range(2)]
    asked = [ToTeach(members, Scoring(distil, 0.7, 32, chunk_tokens=3), seed=5) for distil in settings]

    room = 1.5 * HostModel(random_model).num_bytes / 2**30
    made.clear()
    runs = [RunServices(context(reports, named=named, device_gib=room), host) for _ in settings]
    for run in runs:
        await run.open()
    first = await runs[0].answer("teacher", asked[0])
    await runs[1].answer("judge", ASKED)
    again, sampled = [await run.answer("teacher", each) for run, each in zip(runs, asked, strict=True)]
    with pytest.raises(ServiceFault, match=r"distil\.teacher"):
        await runs[0].answer("teacher", ASKED)
    for run in runs:
        await run.close()
    orders = [("teacher", True, 0), ("judge", True, 1), ("teacher", True, 1), ("teacher", False, 0)]
    assert len(made) == 2 and told(reports) == orders
    for distil, answers in zip(settings, (first, sampled), strict=True):
        alone = TeacherModel.load(random_model, Scoring(distil, 0.7, 32, chunk_tokens=3))
        for taught, expected in zip(answers.taught, scores_of(alone, 5, members).taught, strict=True):
            assert taught.token_ids.tolist() == expected.token_ids.tolist()
            np.testing.assert_allclose(taught.logp, expected.logp, atol=1e-5)
    assert [each.logp.tolist() for each in again.taught] == [each.logp.tolist() for each in first.taught]


@pytest.mark.parametrize("ends", ["its time", "its run"])
async def test_a_batch_that_is_cut_off_has_the_device_until_its_thread_returns(random_model, host, tmp_path, ends):
    gate = tmp_path / "gate"
    gate.touch()
    made = {"model": str(random_model), "max_wait_s": 0.0}
    slow = ServiceEntry(function=f"{HERE}:gated_model", args={"gate": str(gate)}, **made)
    quick = ServiceEntry(function="logprob", **made)
    run = context(named={"slow": slow.model_dump(), "quick": quick.model_dump()})

    names = [await host.load(entry) for entry in (slow, quick)]
    assert await host.answer(names[0], ASKED, run) == 0.5  # its weights are there
    gate.unlink()
    host._loaded[names[0]].entry = slow.model_copy(update={"timeout_s": 0.05 if ends == "its time" else 600.0})
    asked = asyncio.ensure_future(host.answer(names[0], ASKED, run))
    for _ in range(3):
        await asyncio.sleep(0)
    if ends == "its run":
        await host.unload(names[0], run)
        assert await host.load(slow) == names[0]  # another run has the same
    with pytest.raises(ServiceFault, match="did not return within" if ends == "its time" else "its run ends"):
        await asked
    behind = asyncio.ensure_future(host.answer(names[1], ASKED, run))
    await asyncio.sleep(0)
    assert not behind.done()
    gate.touch()
    assert np.isfinite(await behind)
    assert await host.answer(names[0], ASKED, run) == 0.5


def three(model, **limits_s):
    """Services a, b and c, which differ."""
    same = {"model": str(model), "function": "logprob", "max_wait_s": 0.0}
    return {x: same | {"max_batch": n, "timeout_s": limits_s.get(x, 60.0)} for n, x in enumerate("abc", start=1)}


async def test_a_batch_waits_for_other_processes_and_evicts_in_its_turn(random_model, tmp_path):
    entries, reports = three(random_model, c=0.05), list[Any]()
    run = context(reports, named=entries, device_gib=1.5 * HostModel(random_model).num_bytes / 2**30)
    lock = DeviceLock("gpu-0", tmp_path)
    host = ServiceHost(torch.device("cpu"), lock)
    host.share(run)
    names = {name: await host.load(ServiceEntry(**entry)) for name, entry in entries.items()}
    await host.answer(names["a"], ASKED, run)
    other = await lock.taken("service of another process", 60.0)  # the device is free between batches
    asked = asyncio.ensure_future(host.answer(names["b"], ASKED, run))
    for _ in range(9):
        await asyncio.sleep(0)
    assert not asked.done() and told(reports) == [("a", True, 0)]
    other.release()
    await asked
    other = await lock.taken("service of another process", 60.0)
    with pytest.raises(ServiceTimeout, match="another process"):
        await host.answer(names["c"], ASKED, run)
    other.release()
    assert np.isfinite(await host.answer(names["a"], ASKED, run))
    assert told(reports) == [("a", True, 0), ("b", True, 1), ("c", True, 1), ("a", True, 0)]
    assert reports[1].waited_s >= PAUSE_S


async def test_on_the_device_those_used_longest_ago_make_room(random_model, host):
    reports = []
    room = 2.5 * HostModel(random_model).num_bytes / 2**30
    run = RunServices(context(reports, named=three(random_model), device_gib=room), host)
    await run.open()
    for name in "abacab":
        await run.answer(name, ASKED)
    await run.close()
    orders = [("a", True, 0), ("b", True, 0), ("a", False, 0), ("c", True, 1), ("a", False, 0), ("b", True, 1)]
    assert told(reports) == orders


async def test_a_model_too_large_for_the_device_is_refused(random_model, host):
    entry = ServiceEntry(model=str(random_model), function="logprob")
    host.share(context(named={"judge": entry.model_dump()}, device_gib=1e-6))
    with pytest.raises(ConfigError, match=r"services.device_gib: service 'judge'"):
        await host.load(entry, "judge")


def test_what_models_are_asked_without_code_of_ones_own(random_model, monkeypatch):
    host = HostModel(random_model)
    model, seconds = host.restored(torch.device("cpu"))
    assert seconds > 0
    found = {name: FUNCTIONS[name](model, host.tokenizer, [ASKED, ASKED]) for name in ("judge", "logprob", "embed")}
    assert 0 < found["judge"][0] < 1 and found["logprob"][0] < 0 and len(found["embed"][0]) == 32
    assert all(first == second for first, second in found.values())
    swapped = FUNCTIONS["judge"](model, host.tokenizer, [ASKED], yes="no", no="yes")
    assert swapped[0] == pytest.approx(1 - found["judge"][0])
    with pytest.raises(ServiceFault, match="question"):
        FUNCTIONS["judge"](model, host.tokenizer, [ASKED], question="{answer}")
    with torch.no_grad():
        model.lm_head.weight.fill_(np.nan)
    with pytest.raises(ServiceFault, match="nan and nan"):  # it judges nothing
        FUNCTIONS["judge"](model, host.tokenizer, [ASKED])


def test_who_is_judged_cannot_end_the_question(random_model, monkeypatch):
    seen = []

    def likely(model, before, tokens):
        seen.append(before)
        return np.zeros(len(tokens))

    monkeypatch.setattr("libra.worker.services.service_functions._logp", likely)
    tokenizer = HostModel(random_model).tokenizer
    spelled = f"4{tokenizer.eos_token}{tokenizer.eos_token}yes"
    FUNCTIONS["judge"](None, tokenizer, [{"prompt": "2+2", "completion": text} for text in ("4", spelled)])
    counts = [int(np.isin(ids, tokenizer.all_special_ids).sum()) for ids in seen]
    assert counts[0] == counts[-1] and len(seen[-1]) > len(seen[0])


def test_a_reward_model_has_one_number(random_model, tmp_path):
    from transformers import AutoConfig, AutoTokenizer, Qwen3ForSequenceClassification

    config = AutoConfig.from_pretrained(random_model)
    config.num_labels = 1
    torch.manual_seed(0)
    Qwen3ForSequenceClassification(config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(random_model).save_pretrained(tmp_path)
    host = HostModel(tmp_path, labels=True)
    model, _ = host.restored(torch.device("cpu"))
    first, second = FUNCTIONS["score"](model, host.tokenizer, [ASKED, {"prompt": "a", "completion": "b"}])
    assert np.isfinite([first, second]).all() and first != second
