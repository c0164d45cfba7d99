"""What `libra run` would refuse in a configuration before any worker starts, as checks of `libra doctor`: one line each."""

from __future__ import annotations

from collections.abc import Iterator

from libra.cli.check_result import Check
from libra.config import RunConfig
from libra.driver.preflight import CHECKS, Preflight
from libra.envs import Environment
from libra.errors import LibraError


def start_checks(config: RunConfig, environment: Environment | None, *, local_cluster: bool) -> Iterator[Check]:
    """The checks of a run's start (`libra.driver.preflight`), in its order.

    Parameters
    ----------
    environment : Environment or None
        None: it could not be made, and its data are not looked at; nor are they where a part of the user's own is refused.
    local_cluster : bool
        Whether the run would start its own workers.

    A model on a hub is not fetched, and what needs its files is left out.
    """
    directory = None if config.run.name is None else config.run.dir / config.run.name
    known = Preflight(config, local_cluster, directory, environment=environment)
    for name, check in CHECKS.items():
        if name == "engine" and config.rollout.engine == "vllm":  # of which the check of the machine's engines tells
            continue
        try:
            found = check(known)
        except LibraError as error:
            detail, _, advice = " ".join(str(error).split()).rpartition("; ")
            yield Check(name, "fail", detail or advice, advice.removeprefix("type ") if detail else "")
            if name == "own parts":
                known.environment = None
        else:
            if found:
                yield Check(name, "ok", found)
