"""The pool of sessions of one worker: what is given out, what is replaced, and factories that raise or hang."""

import asyncio
import threading

import pytest

from libra.envs import check_state, session, tool
from libra.envs.sessions import SessionPool
from libra.errors import ConfigError, EnvironmentFault, SessionLost, ToolTimeout
from libra.testing import FixedTurns


class Made:
    """A session that notes what happens to it."""

    def __init__(self):
        self.dead, self.closed, self.resets = False, 0, 0

    def reset(self) -> None:
        self.resets += 1

    def close(self):
        self.closed += 1


def pool_of(clock=lambda: 0.0, **options):
    given = {"reset": Made.reset, "close": Made.close, "alive": lambda made: not made.dead, "timeout_s": 5.0, **options}
    return SessionPool(session(given.pop("factory", Made), **given), clock)


def value_of(pool, lease):
    return pool.leases[lease].value


async def test_a_session_is_reset_and_given_to_the_next_one():
    pool = pool_of()
    first = await pool.lease("a")
    made = value_of(pool, first)
    await pool.release(first)
    second = await pool.lease("b")
    assert value_of(pool, second) is made and made.resets == 1
    other = await pool.lease("c")
    assert value_of(pool, other) is not made
    assert (pool.counts.made, pool.counts.reused) == (2, 1)
    with pytest.raises(SessionLost):
        await pool.use(first)
    await pool.release(first)  # again: no effect
    await pool.close()
    assert made.closed == 1 and pool.size == 0


async def test_without_reset_or_room_it_is_closed():
    for options in ({"reset": None}, {"idle": 0}):
        pool = pool_of(**options)
        lease = await pool.lease("a")
        made = value_of(pool, lease)
        await pool.release(lease)
        assert made.closed == 1 and not pool.free


async def test_a_dead_one_is_replaced_and_its_holder_learns_it():
    pool = pool_of()
    lease = await pool.lease("a")
    made = value_of(pool, lease)
    made.dead = True
    with pytest.raises(SessionLost):
        await pool.use(lease)
    assert made.closed == 1
    idle = await pool.lease("b")
    await pool.release(idle)
    pool.free[0].dead = True
    assert not value_of(pool, await pool.lease("c")).dead
    assert pool.counts.replaced == 2


def raises(*_):
    raise OSError("no display")


async def test_functions_that_raise_or_hang():
    gate = threading.Event()
    with pytest.raises(ToolTimeout):
        await pool_of(factory=gate.wait, timeout_s=0.05).lease("a")
    gate.set()
    with pytest.raises(EnvironmentFault):
        await pool_of(factory=raises).lease("a")
    pool = pool_of(reset=raises, close=raises)
    await pool.release(await pool.lease("a"))
    assert not pool.free and pool.counts.replaced == 1 and pool.size == 0
    pool = pool_of(alive=raises)
    with pytest.raises(SessionLost):
        await pool.use(await pool.lease("a"))


async def test_of_a_full_pool_the_next_one_waits_for_a_release_and_not_for_ever():
    pool = pool_of(most=1)
    first = await pool.lease("a")
    waiting = asyncio.ensure_future(pool.lease("b"))
    await asyncio.sleep(0)
    await pool.release(first)
    assert value_of(pool, await waiting).resets == 1
    now = iter([0.0, 99.0, 99.0, 99.0, 99.0])
    pool.clock = lambda: next(now)
    with pytest.raises(EnvironmentFault):
        await pool.lease("c")


async def test_a_lease_that_nobody_used_for_long_ends_for_another():
    now = [0.0]
    pool = pool_of(lambda: now[0], most=1, lease_s=60.0)
    first = await pool.lease("a")
    now[0] = 61.0
    assert value_of(pool, await pool.lease("b")).resets == 1
    assert pool.counts.expired == 1
    with pytest.raises(SessionLost):
        await pool.use(first)


@pytest.mark.parametrize(("factory", "options"), [(3, {}), (Made, {"most": 0}), (Made, {"timeout_s": 0})])
def test_wrong_declarations_are_refused(factory, options):
    with pytest.raises(ConfigError):
        session(factory, **options)


def test_a_tool_that_takes_a_session_needs_one_and_is_never_inline():
    def look(session: Made) -> str:
        """Look."""
        return ""

    def environment(inline=False, **attributes):
        made = {"__init__": lambda self: None, "tools": (tool(look, inline=inline),)}
        return type("Own", (FixedTurns,), attributes | made)()

    for wrong in (environment(), environment(inline=True, session=session(Made)), environment(session="a browser")):
        with pytest.raises(ConfigError):
            check_state(wrong)
    made = environment(session=session(Made))
    assert check_state(made) is made and "session" not in made.tools[0].parameters
