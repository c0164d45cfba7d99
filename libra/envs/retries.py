"""Calls that an API refuses for now (HTTP 429) are made again, later and later, for a bounded time.

Invariants
----------
1. A refused call is never an outcome: the model reads nothing of it, and no reward comes of it, until retries are used up.
2. The wait before retry ``n`` (0, 1, ...) is ``first_s x 2^n``, less a random part of up to a half, and never less than the API
   says (``Retry-After``). The random part comes from the run's seed and the name of the call.
3. Nothing is tried again later than ``TOTAL_S`` after the first attempt began.
"""

from __future__ import annotations

import asyncio
import email.utils
import logging
import math
import zlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

from libra.errors import RateLimited

logger = logging.getLogger(__name__)

T = TypeVar("T")
TOO_MANY = 429
TOTAL_S = 120.0
"""Seconds after its first attempt within which a call is tried again."""


@dataclass(frozen=True, slots=True)
class BackOff:
    """How calls of a run are tried again: ``environment.retries``, and the run's seed."""

    retries: int = 5
    first_s: float = 1.0
    seed: int = 0

    def wait_s(self, attempt: int, refused: Refused, rng: np.random.Generator) -> float | None:
        """Seconds before retry ``attempt`` (from 0); None: there is none."""
        if attempt >= self.retries:
            return None
        own_s = self.first_s * 2.0**attempt * (1.0 - 0.5 * float(rng.random()))
        return max(own_s, refused.retry_after_s or 0.0)


NEVER = BackOff(retries=0)


@dataclass(frozen=True, slots=True)
class Refused:
    """A call was refused for now; ``retry_after_s`` is what the API says, None: nothing."""

    retry_after_s: float | None = None


class Clock(Protocol):
    """Seconds, and a way to wait for some."""

    def now_s(self) -> float: ...

    async def wait(self, seconds: float) -> None: ...


class LoopClock:
    """That of the running event loop."""

    def now_s(self) -> float:
        """Seconds since some moment."""
        return asyncio.get_running_loop().time()

    async def wait(self, seconds: float) -> None:
        """Return that much later."""
        await asyncio.sleep(seconds)


def refused(error: BaseException | None, at_s: float) -> Refused | None:
    """Whether ``error`` says that an API refuses a call for now: ours, or that of a client of HTTP; None: it says something else.

    Clients are recognised by what they have in common: urllib, requests, httpx, aiohttp, openai and anthropic tell the status as
    ``code``, ``status``, ``status_code`` or that of ``response``, and headers likewise. ``at_s``: the time of day, in seconds since
    1970, for a ``Retry-After`` that is a date.
    """
    if error is None:
        return None
    if isinstance(error, RateLimited):
        return Refused(_seconds(error.retry_after_s))
    try:
        places = (error, getattr(error, "response", None))
        statuses = [getattr(place, name, None) for place in places for name in ("status_code", "status", "code")]
        if not any(type(status) is int and status == TOO_MANY for status in statuses):
            return None
        headers = [getattr(place, name, None) for place in places for name in ("headers", "hdrs")]
    except Exception:  # noqa: BLE001 boundary: attributes of an error of the user's code
        return None
    told = (_retry_after_s(each, at_s) for each in headers if each is not None)
    return Refused(next((after_s for after_s in told if after_s is not None), None))


def _retry_after_s(headers: Any, at_s: float) -> float | None:
    try:
        value = headers.get("Retry-After", headers.get("retry-after"))
        if not isinstance(value, str):
            return None
        if value.strip().isdecimal():
            return float(value)
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - at_s)
    except Exception:  # noqa: BLE001 boundary: whatever an error has under that name, and whatever a server says
        return None


def _seconds(value: Any) -> float | None:
    """A number of the user's code as seconds; None if it is none, or not a number."""
    try:
        seconds = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return None if math.isnan(seconds) else seconds


async def with_retries(
    call: Callable[[], Awaitable[T]],
    refusal: Callable[[T], Refused | None],
    back_off: BackOff,
    name: str,
    clock: Clock | None = None,
) -> tuple[T, int]:
    """The first outcome of ``call`` that is no refusal, or the last one; and how often it was made again.

    Parameters
    ----------
    refusal : callable
        What an outcome says of a refusal; None: it is none.
    name : str
        Of the call in its run, for the log and for the random part of waits.
    """
    clock = clock or LoopClock()
    rng = np.random.default_rng([back_off.seed, zlib.crc32(name.encode())])
    began_s, attempt = clock.now_s(), 0
    while True:
        outcome = await call()
        told = refusal(outcome)
        if told is None:
            return outcome, attempt
        wait_s = back_off.wait_s(attempt, told, rng)
        if wait_s is None or clock.now_s() + wait_s > began_s + TOTAL_S:
            return outcome, attempt
        attempt += 1
        logger.info("%s: refused for now; retry %d of %d in %.2f s", name, attempt, back_off.retries, wait_s)
        await clock.wait(wait_s)
