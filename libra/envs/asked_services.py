"""`libra.ask`: rewards and tools query the services of their run (section ``services``).

A call finds its run by the context in which it started (`asking`). Without a context, as in a
user's own thread, the run is the only run of this process.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

from libra.errors import ConfigError, ServiceFault, nearest
from libra.named_parts import name_of
from libra.types import Episode, Late, Prompt


class Asker(Protocol):
    """The services of one run on one worker."""

    @property
    def names(self) -> Collection[str]:
        """Names of the services."""

    loop: asyncio.AbstractEventLoop
    """Event loop of `answer`."""
    pid: int
    """Process of that loop."""

    async def answer(self, service: str, given: Any) -> Any:
        """The answer of a service; raises ServiceFault."""

    def answer_later(self, service: str, given: Any, trajectory_id: str) -> None:
        """Deliver the answer later, as the reward of a trajectory."""


_HERE: list[Asker] = []
_ASKER: ContextVar[Asker | None] = ContextVar("libra_services", default=None)


@contextmanager
def services_here(asker: Asker) -> Iterator[None]:
    """Make ``asker`` the services of this process."""
    _HERE.append(asker)
    try:
        yield
    finally:
        _HERE.remove(asker)


@contextmanager
def asking(asker: Asker | None) -> Iterator[None]:
    """Make ``asker`` the services of `ask` here and in calls that start here."""
    token = _ASKER.set(asker)
    try:
        yield
    finally:
        _ASKER.reset(token)


def ask(service: str, given: Any) -> Any:
    """Wait for the answer of a service of this run to ``given``, in a plain reward or tool.

    Parameters
    ----------
    service : str
        A name of ``services.named``.
    given : Any
        One input of the service's function. The functions for models take a text, or a mapping with
        "prompt" or "messages", and "completion".

    Raises
    ------
    ServiceFault
        The service failed, its API refused the call in every retry, the run has no such service, or
        the caller runs where no service is available.
    """
    asker = _asker(service)
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run_coroutine_threadsafe(asker.answer(service, given), asker.loop).result()
    raise ServiceFault(
        f"service {service!r}: libra.ask waits, and was called in a coroutine, which would stop everything else; type await "
        f"libra.ask_async({service!r}, ...)"
    )


async def ask_async(service: str, given: Any) -> Any:
    """`ask` for rewards and tools that are coroutines."""
    asker = _asker(service)
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(asker.answer(service, given), asker.loop))


def _asker(service: str) -> Asker:
    asker, where = _ASKER.get() or (_HERE[0] if len(_HERE) == 1 else None), f"service {service!r}:"
    if asker is None:
        why = "of several runs" if _HERE else "of a run with services"
        raise ServiceFault(f"{where} this call is not in a reward or tool {why}; ask there; services.named names it")
    if asker.pid != os.getpid():
        raise ServiceFault(
            f"{where} this call has cores, memory or a GPU, and so a process of its own, which can ask no service; leave them "
            "out, or ask the service in the reward"
        )
    if service not in asker.names:
        raise ServiceFault(
            f"{where} this run has none of that name{nearest(service, list(asker.names))}; services.named has "
            f"{', '.join(sorted(asker.names))}"
        )
    return asker


def service(
    function: str | Callable[..., Any] = "judge",
    *,
    model: str | None = None,
    max_batch: int = 8,
    max_wait_s: float = 0.05,
    timeout_s: float = 600.0,
    **args: Any,
) -> dict[str, Any]:
    """An entry of ``services.named`` for ``libra.train(services={"judge": libra.service(...)})``.

    Parameters
    ----------
    function : str or callable
        "judge", "logprob", "score" or "embed", which query ``model``; "teach" for
        ``distil.teacher``; or a function at the top of a module, ``f(inputs)`` or with a model
        ``f(model, tokenizer, inputs)``, that returns one value per input.
    model : str, optional
        A name as in ``model.path``.
    max_batch, max_wait_s : int, float
        Most requests in one batch, and longest seconds that a request waits for others.
    timeout_s : float
        Seconds after which a batch fails.
    **args
        Further keyword arguments of the function.

    Raises
    ------
    ConfigError
        Workers could not import the function by its name.
    """
    named = name_of("libra.service", function)
    return {
        "model": model, "function": named, "args": args, "max_batch": max_batch, "max_wait_s": max_wait_s,
        "timeout_s": timeout_s,
    }  # fmt: skip


@dataclass(frozen=True, slots=True)
class ServiceUse:
    """A service, and the part of an environment that queries it; ``late`` does not wait for
    answers."""

    service: str
    where: str
    late: bool = False


@dataclass(frozen=True, slots=True)
class ServiceReward:
    """The number from a service as the reward: ``{service: judge}``.

    The input has the prompt's last message and all messages, the model's last turn, and columns.
    With ``late`` the reward is `libra.Late` with ``fast`` as provisional value; the final value
    comes with the answer (``trainer.late``). Held-out questions always wait for the answer.
    """

    service: str
    late: bool = False
    fast: float | None = None

    def __post_init__(self) -> None:
        where, fast = f"reward of service {self.service!r}", self.fast
        if not isinstance(self.service, str):
            raise ConfigError(f"reward: service is {self.service!r}; type the name of one of services.named")
        if not isinstance(self.late, bool):
            raise ConfigError(f"{where}: late is {self.late!r}; type true or false")
        if fast is not None and (isinstance(fast, bool) or not isinstance(fast, int | float)):
            raise ConfigError(f"{where}: fast is {fast!r}; type a number, or null")
        if fast is not None and not self.late:
            raise ConfigError(
                f"{where}: fast={fast} is the reward until a late one comes, and late is false; type late: true, or leave fast out"
            )

    def __call__(self, prompt: Prompt, completion: str, episode: Episode, **columns: Any) -> Any:
        messages = [dict(message) for message in prompt.messages]
        last = messages[-1]["content"] if messages else ""
        given = {**columns, "prompt": last, "messages": messages, "completion": completion}
        if not self.late or episode.trajectory_id.startswith("eval"):
            return ask(self.service, given)
        _asker(self.service).answer_later(self.service, given, episode.trajectory_id)
        return Late(fast=None if self.fast is None else float(self.fast))


def service_reward(options: Mapping[str, Any]) -> ServiceReward:
    """The reward of ``{service: NAME, late: true, fast: 0.0}``; ConfigError for other options."""
    known = ("service", "late", "fast")
    for option in options:
        if option not in known:
            raise ConfigError(
                f"reward: no option {option!r} of a service{nearest(option, known)}; known: weight, {', '.join(known)}"
            )
    return ServiceReward(**options)
