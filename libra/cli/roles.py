"""``libra roles``: the roles of the workers of a running run, and changes of them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from libra.cluster.run_contact import reach
from libra.driver.role_client import RoleClient
from libra.errors import ClusterError, ConfigError

_WANTED = re.compile(r"(?P<worker>[^=\s]+)=(?P<role>rollout|train|lent)(?::tp(?P<tp>[1-9]\d*))?")
COLUMNS = ("worker", "role", "tp", "stage", "for_s", "generation", "seconds", "reason")


def assignments(words: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The roles in ``rollout-0=train`` or ``rollout-0=rollout:tp2``, by worker; ConfigError for any other word."""
    wanted: dict[str, dict[str, Any]] = {}
    for word in words:
        match = _WANTED.fullmatch(word)
        if match is None or (match["tp"] and match["role"] != "rollout"):
            raise ConfigError(
                f"libra roles: got {word!r}; allowed are WORKER=rollout, WORKER=rollout:tpN, WORKER=train and WORKER=lent; type "
                "e.g. rollout-0=train"
            )
        if match["worker"] in wanted:
            raise ConfigError(f"libra roles: {match['worker']} has two roles in this command; type one of them")
        wanted[match["worker"]] = {"role": match["role"]} | ({"tp": int(match["tp"])} if match["tp"] else {})
    return wanted


def roles_command(
    run_dir: Path,
    words: Sequence[str],
    *,
    scheduler: str | None = None,
    cancel: int | None = None,
    wait: bool = False,
    as_json: bool = False,
) -> bool:
    """Show the roles, after a change if one is given; False if ``wait`` saw the change undone."""
    wanted = assignments(words)
    if wanted and cancel is not None:
        raise ConfigError(
            "libra roles: --cancel undoes a change, and this command also begins one; type one of them at a time"
        )
    if wait and not wanted and cancel is None:
        raise ConfigError(
            "libra roles: --wait waits for a change, and this command begins none; type e.g. rollout-0=train"
        )
    client, contact = reach(run_dir, scheduler)
    generation, done, rows = None, True, list[dict[str, Any]]()
    with client:
        if contact.hybrid_workers:
            roles = RoleClient(client, contact.run, contact.epoch)
            if wanted:
                generation = roles.change(wanted)
            elif cancel is not None:
                generation = roles.cancel(cancel)
            if generation is not None and wait:
                done = roles.wait(generation)
            rows = roles.rows()
        elif wanted or cancel is not None:  # its scheduler has no such handler
            raise ClusterError(f"libra roles: {table(rows)[0]}")
    if as_json:
        click.echo(
            json.dumps({"run": contact.run, "generation": generation, "changed": done if wait else None, "roles": rows})
        )
        return done
    if generation is not None:
        state = ("has ended" if done else "was undone") if wait else "has begun"
        click.echo(f"change {generation} of run {contact.run} {state}")
    click.echo("\n".join(table(rows)))
    return done


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Lines of a table, a row for each worker."""
    if not rows:
        return ["no worker of this run can change its role; start a run with cluster.hybrid_workers=1 or more"]
    cells = [list(COLUMNS), *([_cell(row.get(name)) for name in COLUMNS] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(COLUMNS))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" if isinstance(value, float) else str(value)
