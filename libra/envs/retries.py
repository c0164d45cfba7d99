"""Exponential back-off for calls that an API refuses for now (HTTP 429).

Invariants
----------
1. Until retries are used up, the model does not read a refused call, and the call gives no reward.
2. The wait before retry ``n`` (0, 1, ...) is ``first_s x 2^n``, less a random part of up to a half,
   and at least the API's ``Retry-After``. The random part depends on the run's seed and the call's
   name.
3. No retry starts later than ``TOTAL_S`` after the first attempt.
"""

from __future__ import annotations

import asyncio
import email.utils
import logging
import math
import zlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from libra.errors import RateLimited

logger = logging.getLogger(__name__)

T = TypeVar("T")
TOO_MANY = 429
TOTAL_S = 120.0
"""Seconds after a call's first attempt in which retries may start."""


@dataclass(frozen=True, slots=True)
class BackOff:
    """``environment.retries`` and the run's seed."""

    retries: int = 5
    first_s: float = 1.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Refused:
    """An API's refusal for now, with its ``Retry-After`` in seconds."""

    retry_after_s: float | None = None


def refused(error: BaseException | None, at_s: float) -> Refused | None:
    """The refusal in an error of Libra or of an HTTP client; None for any other error.

    urllib, requests, httpx, aiohttp, openai and anthropic give the status as ``code``, ``status``
    or ``status_code`` of the error or its ``response``, and headers likewise. ``at_s``, the time in
    seconds since 1970, converts a ``Retry-After`` that is a date.
    """
    if error is None:
        return None
    try:
        if isinstance(error, RateLimited):
            return Refused(_finite(error.retry_after_s))
        places = (error, getattr(error, "response", None))
        statuses = [getattr(place, name, None) for place in places for name in ("status_code", "status", "code")]
        if not any(type(status) is int and status == TOO_MANY for status in statuses):
            return None
        headers = [getattr(place, name, None) for place in places for name in ("headers", "hdrs")]
    except Exception:  # noqa: BLE001 boundary: attributes of an error of the user's code
        return None
    return Refused(next((after_s for each in headers if (after_s := _retry_after_s(each, at_s)) is not None), None))


def _retry_after_s(headers: Any, at_s: float) -> float | None:
    try:
        value = headers.get("Retry-After", headers.get("retry-after"))
        if value.strip().isdecimal():
            return _finite(value)
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - at_s)
    except Exception:  # noqa: BLE001 boundary: the headers are the client's and the server's
        return None


def _finite(value: Any) -> float | None:
    try:
        seconds = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return seconds if math.isfinite(seconds) else None


async def with_retries(
    call: Callable[[], Awaitable[T]],
    refusal: Callable[[T], Refused | None],
    back_off: BackOff,
    name: str,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> tuple[T, int]:
    """Await ``call`` until its outcome is not refused; returns the outcome and number of retries.

    ``refusal`` finds the refusal in an outcome. ``name``, the call's name in its run, is for the
    log and the random part of waits.
    """
    rng, loop = np.random.default_rng([back_off.seed, zlib.crc32(name.encode())]), asyncio.get_running_loop()
    began_s, attempt = loop.time(), 0
    while True:
        outcome = await call()
        told = refusal(outcome)
        if told is None or attempt >= back_off.retries:
            return outcome, attempt
        own_s = back_off.first_s * 2.0**attempt * (1.0 - 0.5 * float(rng.random()))
        wait_s = max(own_s, told.retry_after_s or 0.0)
        if loop.time() + wait_s > began_s + TOTAL_S:
            return outcome, attempt
        attempt += 1
        logger.info("%s: refused for now; retry %d of %d in %.2f s", name, attempt, back_off.retries, wait_s)
        await sleep(wait_s)
