"""The hook by which tests may be coroutines; a `conftest.py` that imports it has it for its folder."""

import asyncio
import inspect

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Run tests that are coroutines, and close their fixtures that have `aclose`."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}

    async def run():
        try:
            await pyfuncitem.obj(**given)
        finally:
            for each in given.values():
                if hasattr(each, "aclose"):
                    await each.aclose()

    asyncio.run(run())
    return True
