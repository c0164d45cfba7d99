"""Where engines exchange KV a pause costs little: memory decides who waits, and places are asked for again."""

import pytest
from msgspec import structs

from libra import facts
from libra.policy import EVERYONE, Dispatcher
from libra.policy.engine_table import EngineTable
from libra.types import Phase


def engine(name="e0", *, token_bytes=1000, kv_tokens=10_000):
    return facts.WorkerCapacity(
        name, "tp1", 64, kv_tokens=kv_tokens, alone_s_per_token=0.01, full_s_per_token=0.02, prefill_s_per_token=1e-4,
        kv_token_bytes=token_bytes,
    )  # fmt: skip


def parked(key, quanta=0, context=0):
    return facts.TrajectoryParked(key, 0, Phase.ROLLOUT, quanta, context_tokens=context)


def begin(dispatcher, key, final):
    dispatcher.handle(parked(key))
    dispatcher.apply(
        [facts.SetPriority(key, facts.Priority(0, 1, 0), ""), facts.Prefer(key, (), "", final - 100, final)]
    )
    return dispatcher.dispatch(Phase.ROLLOUT)


@pytest.mark.parametrize("token_bytes", [0, 1000])
def test_memory_is_kept_for_growth_only_where_a_pause_costs_the_context(token_bytes):
    dispatcher = Dispatcher()
    dispatcher.handle(engine(token_bytes=token_bytes))
    begun = sum(bool(begin(dispatcher, f"t{k}", 4000)) for k in range(6))
    assert begun == (6 if token_bytes else 2)  # 10,000 tokens hold two of 4,000
    dispatcher.handle(facts.QuantumFinished("t0", Phase.ROLLOUT, 9_900, "", "", 1.0))
    dispatcher.handle(parked("back", 1, 200))
    dispatcher.apply([facts.SetPriority("back", facts.Priority(0, 1, 0), "")])
    assert not dispatcher.dispatch(Phase.ROLLOUT)  # what is held now counts everywhere


@pytest.mark.parametrize("token_bytes", [0, 1000])
def test_slots_are_released_while_engines_that_exchange_kv_are_full(token_bytes):
    dispatcher = Dispatcher()
    dispatcher.handle(engine(token_bytes=token_bytes))
    begin(dispatcher, "t", 9900)
    dispatcher.handle(facts.QuantumFinished("t", Phase.ROLLOUT, 8_900, "", "", 1.0))
    assert dispatcher.ahead() is None
    dispatcher.handle(facts.QuantumFinished("t", Phase.ROLLOUT, 200, "", "", 1.0))
    assert (dispatcher.ahead() is EVERYONE) == (token_bytes > 0)
    dispatcher.handle(facts.TrajectoryEnded("t"))
    assert dispatcher.ahead() is None


def full(token_bytes=1000, tools_s=0.0, *, inline=True):
    """An engine with room for 10,000 tokens, in whose slots two with 9,000 and 6,000 go on; a second of each was for generating."""
    dispatcher = Dispatcher()
    dispatcher.handle(structs.replace(engine(token_bytes=token_bytes), full_s_per_token=0.01))
    assert begin(dispatcher, "long", 1000) and begin(dispatcher, "short", 1000)
    for key, payload in (("long", 8_900), ("short", 5_900)):
        if inline:
            dispatcher.handle(facts.QuantumFinished(key, Phase.ROLLOUT, 100, "t", "ok", 1 + tools_s, payload, tools_s))
        else:
            dispatcher.handle(facts.QuantumFinished(key, Phase.ROLLOUT, 100, "", "", 1.0))
            dispatcher.handle(facts.QuantumFinished(key, Phase.TOOL, 0, "t", "ok", tools_s, payload))
        dispatcher.handle(facts.QuantumStarted(key, Phase.ROLLOUT, "e0"))
    return dispatcher


@pytest.mark.parametrize(("token_bytes", "tools_s", "placed"), [(1000, 0.0, []), (1000, 1.0, ["a"]), (0, 1.0, [])])
@pytest.mark.parametrize("inline", [True, False])
def test_contexts_need_no_memory_while_their_tools_run(token_bytes, tools_s, placed, *, inline):
    dispatcher = full(token_bytes, tools_s, inline=inline)
    for key, context in (("a", 4_900), ("b", 200)):  # 19,900 tokens with the first, 20,100 with both
        dispatcher.handle(parked(key, 1, context))
        dispatcher.apply([facts.SetPriority(key, facts.Priority(0, 1, 0), "")])
    assert [place.key for place in dispatcher.dispatch(Phase.ROLLOUT)] == placed


def test_waits_for_memory_make_no_more_room_and_tools_however_long_eight_times():
    host = EngineTable()
    host.handle(engine())
    for key, latency_s, tools_s in (("a", 60.0, 1.0), ("b", 60.0, 1.0)):
        host.handle(facts.QuantumStarted(key, Phase.ROLLOUT, "e0"))
        host.handle(facts.QuantumFinished(key, Phase.ROLLOUT, 100, "t", "ok", latency_s, 0, tools_s))
    assert host.engines["e0"].open_tokens == pytest.approx(20_000, rel=0.01)
    host.handle(facts.QuantumStarted("a", Phase.ROLLOUT, "e0"))
    host.handle(facts.QuantumFinished("a", Phase.ROLLOUT, 0, "t", "ok", 1e6, 0, 1e6))
    assert host.engines["e0"].open_tokens == 80_000


def loaded(*engines):
    """Engines so many times as slow as `engine`, with trajectories at home there that have so many tokens left."""
    dispatcher = Dispatcher()
    dispatcher.allowed = lambda key, worker: key.startswith(worker)
    for n, (slow, lefts) in enumerate(engines):
        dispatcher.handle(structs.replace(engine(f"e{n}"), alone_s_per_token=0.01 * slow, full_s_per_token=0.02 * slow))
        for place, left in enumerate(lefts):
            assert begin(dispatcher, f"e{n}-{place}", left + 100)
    return dispatcher


def test_slots_are_released_while_engines_that_exchange_kv_end_at_different_times():
    assert loaded((1.0, [1000, 1000]), (1.0, [1000, 900])).ahead() is None
    assert loaded((1.0, [1000, 1000]), (1.0, [500, 500])).ahead() is EVERYONE
    assert loaded((1.0, [2000, 2000]), (2.0, [1000, 1000])).ahead() is None  # half the speed, half the tokens
    assert loaded((1.0, [1000, 1000]), (2.0, [1000, 1000])).ahead() is EVERYONE
    assert loaded((1.0, [4000]), (1.0, [])).ahead() is None  # alone on the quickest engine it keeps its slot
    assert loaded((1.0, [4000]), (2.0, [])).ahead() is None
    assert loaded((1.0, []), (2.0, [4000])).ahead() is EVERYONE
