"""Work on what agents send, off the event loop where it is long: reading, comparing and tokenising 16 MiB takes seconds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

LONG = 32 << 10
"""Characters, or bytes, of which the work is done by a thread."""
_THREADS = ThreadPoolExecutor(2, thread_name_prefix="libra-agents")


async def by_size(size: int, work: Callable[[], Any]) -> Any:
    """What ``work`` returns: called here where ``size`` is below `LONG`, else by one of two threads, in the order of asking."""
    if size < LONG:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_THREADS, work)
