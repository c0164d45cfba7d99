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


def inside(made):
    """A decorator of coroutines that are tests: their first argument comes from an asynchronous context manager."""

    def wrap(test):
        def whole(**given):
            async def run():
                async with made() as first:
                    await test(first, **given)

            asyncio.run(run())

        _, *fixtures = inspect.signature(test).parameters.values()
        whole.__signature__ = inspect.Signature(fixtures)
        whole.__name__, whole.__doc__ = test.__name__, test.__doc__
        return whole

    return wrap
