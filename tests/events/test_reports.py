import msgpack
import numpy as np
import pytest

from libra.events import VersionServed, to_json
from libra.events import reports as r
from libra.events.reports import REPORTS, TOPIC, EngineReport, decode, encode
from libra.types import EngineCapacity, StepSeconds

AT = {"name": "rollout-0", "address": "tcp://10.0.0.1:1"}
STEPS = StepSeconds(0.1, 0.2, 0.3, 0.4, 5, 0.6)
EXAMPLES = [
    r.QuantumReport(
        key="k", quantum=2, next="TOOL", goes_on=True, end="", failure="none", detail="", tokens=7, version=1, tool="search",
        status="ok", payload_tokens=3, context_tokens=40, start_s=1.5, stop_s=2.5,
    ),
    r.FoundEndedReport("k", 4, "answered"),
    r.HomeChangedReport("k", 0.018, 1048576, ""),
    r.GivenBackReport("k"),
    r.GroupReport("train", 1, 2, -1, None, {"tool": 1}, {"worker": "w", "num_bytes": (3,)}),
    r.PublishedReport(3, "d", 10, "tcp://10.0.0.1:1", ("10.0.0.1", 5)),
    r.JoinedReport(**AT, weights=("10.0.0.1", 5), engine=r.EngineKindFields("vllm", "vllm-tp2", 2, 8), kv=("10.0.0.1", 6)),
    r.AsleepReport(**AT),
    r.AwakeReport(**AT),
    r.ServedReport(
        **AT, version=1, load_s=0.5, tp=2, bucket="vllm-tp2", stats={"steps": 3, "busy_s": 0.25},
        check=r.CheckNumbers("columns", 0.0, 0.0, None, 9, None, 0.0, True, 0.1, 0.2),
    ),
    r.QuarantinedReport(**AT, version=1, layer="(all)", method="probe", gap=None, tolerance=0.1, detail="", out=True),
    r.RecheckedReport(**AT, version=1, passed=False, layer="l", method="projections", gap=0.5, tolerance=0.1, detail=""),
    r.DeclaredReport("rollout-0", "vllm", "vllm-tp2", "m", EngineCapacity(1, 2, 3, 4, 5, STEPS)),
    r.DeclaredReport("rollout-0", "vllm", "vllm-tp2", "m", EngineCapacity(1, 2, 3, 4, 5)),
    r.ReadyReport(**AT),
    r.NotReadyReport(**AT, detail="OSError"),
    r.StepReport(1, 0.5, 2.0),
    r.WaveReport(3, 0, 2, 6, 0.75),
    r.ServiceReport("judge", "tool-0", 3, 0.05, 0.5, 1.25, True, 1),
    r.ScoredReport(1, 2, 0.75, 0.25),
    r.LateReport(3, 16, ((1, 0, 1, 2, 5),), ((1, 0, 2),), ((1, 0, 2, 2),), ((1, 0, 5),), 4, 1, 0),
    r.SessionReport(made=1, replaced=1),
    r.IterationReport(1, None, 0.5),
    r.EvaluationReport(1, None, 64),
    r.PlanReport("plan_considered", {"seconds": 1.5}),
    r.PromptsReport(1, ["a", ""]),
    r.BoundariesReport({"1": 100.0}, "asked for"),
    r.TrainerReport(**AT),
    r.GangOpenReport(1, "10.0.0.1", 5),
    r.GangJoinedReport(1, 0, 3),
    r.GangFailedReport(1, 0, "lost"),
    r.HybridPoolReport(0, "10.0.0.1", 5),
    r.RoleMemberReport(**AT, tp=1, slots=8, share={"cores": "", "devices": ""}),
    r.RoleStageReport("rollout-0", 1, "draining", 0.5),
    r.RoleFailedReport("rollout-0", 1, "no memory"),
]  # fmt: skip


def test_every_kind_has_an_example():
    assert {type(report) for report in EXAMPLES} == set(REPORTS.values())


@pytest.mark.parametrize("report", EXAMPLES, ids=lambda report: type(report).__name__)
def test_a_report_comes_back_as_it_was_sent(report):
    wire = msgpack.unpackb(msgpack.packb(encode("demo", 3, report)), use_list=False)  # as Dask does
    received = decode(TOPIC, wire | {"worker": "tcp://10.0.0.1:1"})
    assert received is not None
    assert (received.run, received.epoch, received.worker) == ("demo", 3, "tcp://10.0.0.1:1")
    assert received.report == report and REPORTS[wire["kind"]] is type(report)


def test_numpy_scalars_become_numbers():
    step = r.StepReport(np.int64(1), np.float64(0.5), np.float32(2.0))
    received = decode(TOPIC, encode("demo", 0, step))
    assert received is not None and received.report == r.StepReport(1, 0.5, 2.0)


def test_counters_stay_whole_numbers_on_their_way_into_the_log():
    (served,) = (report for report in EXAMPLES if isinstance(report, r.ServedReport))
    received = decode(TOPIC, encode("demo", 0, served))
    assert received is not None and isinstance(received.report, r.ServedReport)
    line = to_json(VersionServed(run="demo", t_s=1.0, version=1, worker="w", load_s=0.1, stats=received.report.stats))
    assert '"stats":{"steps":3,"busy_s":0.25}' in line


def test_a_plugin_takes_the_types_that_it_handles():
    asleep = encode("demo", 0, r.AsleepReport(**AT))
    assert decode(TOPIC, asleep, EngineReport) is not None
    assert decode(TOPIC, asleep, r.GangReport) is None
    assert decode(TOPIC, asleep, (r.GangReport, r.AsleepReport)) is not None


def test_what_is_no_report_is_ignored():
    unknown = [{"kind": kind, "run": "demo", "epoch": 0} for kind in ("new", "EngineReport")]
    for message in ("text", {}, *unknown):
        assert decode(TOPIC, message) is None
    assert decode("quanta", encode("demo", 0, r.GivenBackReport("k"))) is None


@pytest.mark.parametrize("wrong", [{"key": 3}, {"epoch": None}])
def test_a_malformed_report_is_logged_and_ignored(caplog, wrong):
    message = encode("demo", 0, r.GivenBackReport("k")) | wrong
    assert decode(TOPIC, {name: value for name, value in message.items() if value is not None}) is None
    assert "a malformed report is ignored" in caplog.text
