"""One engine against arithmetic: seconds of batches, KV memory, the prefix cache, new weights."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from libra.errors import ConfigError
from libra.hardware import Residuals
from libra.hardware.engine_tables import HostKv, HostPool, Request
from libra.hardware.virtual_engine import VirtualEngine

NOISE = Residuals((-0.1, 0.0, 0.2), (-0.1, 0.1))
REQUESTS = st.lists(
    st.tuples(st.integers(1, 400), st.integers(1, 200), st.floats(0, 5), st.integers(0, 2)), min_size=1, max_size=25
)


def engine_of(tables, residuals=None):
    return VirtualEngine("e", tables, residuals=residuals, rng=np.random.default_rng(0))


def run_dry(engine):
    ends = {}
    while (at_s := engine.next_finish_s()) is not None:
        for request in engine.finished(at_s):
            ends[request.key] = at_s
    return ends


def test_one_request_takes_its_prefill_and_its_steps(tables):
    engine = engine_of(tables())
    engine.submit(0.0, Request("a", "g", 1000, 0, 100), ())
    (end,) = run_dry(engine).values()
    assert end == pytest.approx(1.0 + 100 * (0.010 + 1e-6 * 1050), rel=0.01)  # context 1,000 to 1,100; grain 256
    assert engine.counters.prefilled_tokens == 1000 and engine.counters.generated_tokens == 100


def test_a_batch_shares_its_steps_and_a_short_one_leaves_first(tables):
    engine = engine_of(tables())
    engine.submit(0.0, Request("short", "g", 10, 0, 10), ())
    engine.submit(0.0, Request("long", "g", 10, 0, 100), ())
    ends = run_dry(engine)
    assert ends["short"] == pytest.approx(0.02 + 10 * 0.0103, rel=0.05)
    assert ends["long"] == pytest.approx(0.02 + 100 * 0.0102, rel=0.05)


def test_kept_context_is_not_computed_again_and_is_pushed_out_oldest_first(tables):
    engine = engine_of(tables(kv=300))
    for key in ("a", "b"):
        engine.submit(0.0, Request(key, key, 90, 0, 10), ())
    run_dry(engine)
    assert engine.counters.prefilled_tokens == 180 and engine.kv_tokens == 200
    engine.submit(9.0, Request("c", "c", 140, 0, 10), ())  # has room when a's context goes
    engine.submit(9.0, Request("b", "b", 100, 0, 10, 100), ())
    run_dry(engine)
    counters = engine.counters
    assert (counters.prefilled_tokens, counters.cached_tokens, counters.recomputed_tokens) == (320, 100, 0)
    engine.submit(99.0, Request("a", "a", 100, 0, 10, 100), ())
    run_dry(engine)
    assert engine.counters.recomputed_tokens == 100
    assert engine.counters.peak_kv_tokens <= 300


def test_samples_of_a_group_share_the_seconds_of_their_prompt(tables):
    engine = engine_of(tables())
    engine.submit(0.0, Request("a", "g", 500, 500, 10), ())
    engine.submit(0.0, Request("b", "g", 500, 500, 10), ())
    engine.submit(0.0, Request("c", "other", 500, 500, 10), ())
    run_dry(engine)
    assert engine.counters.prefilled_tokens == 1000 and engine.counters.cached_tokens == 500


def test_new_weights_stop_an_engine_that_keeps_its_kv_for_their_loading_alone(tables):
    engine = engine_of(tables())
    engine.submit(1.0, Request("a", "g", 1000, 0, 100), ())
    before = engine.next_finish_s()
    engine.load(2.5, 4.0, keeps_kv=True)
    assert run_dry(engine)["a"] == pytest.approx(before + 4.0, rel=0.01)
    assert engine.counters.recomputed_tokens == 0


def test_new_weights_compute_running_contexts_again_and_drop_kept_ones(tables):
    engine = engine_of(tables())
    engine.submit(0.0, Request("kept", "k", 100, 0, 1), ())
    run_dry(engine)
    engine.submit(1.0, Request("a", "g", 1000, 0, 100), ())
    before = engine.next_finish_s()
    changes = engine.changes
    engine.load(2.5, 4.0)
    assert engine.changes > changes
    (end,) = run_dry(engine).values()
    assert end == pytest.approx(before + 4.0 + 1.0, rel=0.01)
    assert engine.kv_tokens == 1100


def test_a_request_that_never_fits_is_refused_with_what_to_do(tables):
    with pytest.raises(ConfigError):
        engine_of(tables()).submit(0.0, Request("a", "g", 10_000, 0, 1), ())


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(requests=REQUESTS, kind=st.sampled_from(["plain", "noisy", "preempts", "host"]))
def test_every_request_ends_once_and_kv_never_overflows(tables, requests, kind):
    host = HostKv(HostPool(10_000, 0.01, 1e-5)) if kind == "host" else None
    engine = VirtualEngine(
        "e", tables(kv=700), residuals=NOISE if kind == "noisy" else None, rng=np.random.default_rng(0),
        preempts=kind == "preempts", host=host,
    )  # fmt: skip
    arrivals = sorted((at, i) for i, (_, _, at, _) in enumerate(requests))
    ends = {}
    now = 0.0
    while arrivals or engine.next_finish_s() is not None:
        at_s = engine.next_finish_s()
        if arrivals and (at_s is None or arrivals[0][0] <= at_s):
            now, i = arrivals.pop(0)
            context, new, _, group = requests[i]
            if host is not None and i % 2:
                host.put(f"r{i}", context)
            engine.submit(now, Request(f"r{i}", f"g{group}", context, 0, new), (group,))
        else:
            assert at_s is not None and at_s >= now
            now = at_s
            for request in engine.finished(now):
                assert request.key not in ends
                ends[request.key] = now
        over = len(requests) if kind in ("preempts", "host") else 0  # one more token each until the next event
        assert engine.kv_tokens <= 700 + over
    assert len(ends) == len(requests)
    assert engine.counters.generated_tokens == sum(new for _, new, _, _ in requests)


def test_an_engine_that_preempts_starts_more_and_computes_a_context_again(tables):
    whole, grows = (
        VirtualEngine("e", tables(kv=1100), residuals=None, rng=np.random.default_rng(0), preempts=preempts)
        for preempts in (False, True)
    )
    for engine in (whole, grows):
        for key in ("a", "b"):
            engine.submit(0.0, Request(key, key, 100, 0, 900), ())
    assert whole.load_now == (1, 1, 0) and grows.load_now == (2, 0, 0)
    ends = run_dry(grows)
    # Both grow to 550 tokens each; then b waits for a's end, and its 550 tokens are computed again.
    full_s = 0.2 + 450 * (0.010 + 1e-6 * 650)
    a_s = full_s + 450 * (0.010 + 1e-6 * 775)
    assert ends["a"] == pytest.approx(a_s, rel=0.02)  # grain 256
    assert ends["b"] == pytest.approx(a_s + 0.55 + 450 * (0.010 + 1e-6 * 775), rel=0.02)
    assert grows.counters.preempted == 1 and grows.counters.generated_tokens == 1800
    assert grows.counters.recomputed_tokens == pytest.approx(550, abs=1)


def test_kv_comes_from_host_memory_where_that_is_sooner(tables):
    host = HostKv(HostPool(2_000, 0.1, 1e-5))
    engine = VirtualEngine("e", tables(), residuals=None, rng=np.random.default_rng(0), host=host)
    host.put("far", 1000)
    host.put("near", 50)  # 0.05 s to compute, 0.1005 s to fetch
    engine.submit(0.0, Request("far", "f", 1000, 0, 100, 1000), ())
    engine.submit(0.0, Request("near", "n", 50, 0, 5, 50), ())
    ends = run_dry(engine)
    assert ends["near"] == pytest.approx(0.05 + 5 * 0.0101, rel=0.02)  # it went on meanwhile
    assert ends["far"] == pytest.approx(0.11 + 100 * (0.010 + 1e-6 * 1050), rel=0.02)
    assert host.fetched_tokens == 1000 and engine.counters.cached_tokens == 1000
    assert engine.counters.recomputed_tokens == 50
    host.put("more", 1500)
    assert (host.tokens("far"), host.tokens("near"), host.held_tokens) == (0, 50, 1550)
