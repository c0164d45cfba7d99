"""A check of Host and Origin: only pages that the dashboard served itself may use the dashboard.

Otherwise another site's page in the same browser could read it, by a websocket or by a domain name
that points to 127.0.0.1 (DNS rebinding). Such requests carry the other site's name.

Invariants
----------
1. A request is answered only if its Host is an IP address, localhost, a name of this machine, or
   one of ``cluster.dashboard_names``. An IP address cannot be rebound.
2. An Origin must equal that Host (with the port) or have a name in ``cluster.dashboard_names``.
3. Comparisons of names ignore case and a final dot.
4. On a scheduler that was started without Libra's settings, and that others may share, only Libra's
   own pages are checked; with `SETTING` in its Dask configuration, all pages.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from typing import Any
from urllib.parse import urlsplit

import dask.config
from tornado.httputil import HTTPServerRequest
from tornado.web import Application, RequestHandler

SETTING = "libra.dashboard-names"
"""Key of ``cluster.dashboard_names`` in the configuration of Dask, which reaches every scheduler."""


def check_names(pages: Application, *, shared: bool = False) -> None:
    """Answer only requests that `refusal` allows. A second call changes nothing. ``shared``:
    whether another user may have started the scheduler, for other work."""
    if hasattr(pages, "libra_names"):
        return
    given: Iterable[str] | None = dask.config.get(SETTING, None)
    allowed, libra_only = frozenset(map(_plain, given or ())), shared and given is None
    pages.libra_names = allowed  # type: ignore[attr-defined]
    find, machine = pages.find_handler, own_names()

    def find_handler(request: HTTPServerRequest, **kwargs: Any) -> Any:
        if not libra_only or "libra" in request.path.split("/"):
            host, origin = request.headers.get("Host", ""), request.headers.get("Origin")
            if (reason := refusal(host, origin, machine, allowed)) is not None:
                return pages.get_handler_delegate(request, _Refused, {"reason": reason})
        return find(request, **kwargs)

    pages.find_handler = find_handler  # type: ignore[method-assign]


def refusal(host: str, origin: str | None, machine: frozenset[str], allowed: frozenset[str]) -> str | None:
    """Why a request with these headers is refused; None if it is allowed. ``machine`` has names of
    this machine, ``allowed`` names that a user added, both in lower case."""
    name, port = _place(f"//{host}")
    if not name or not (_is_address(name) or name.endswith(".localhost") or name in machine | allowed):
        return f"Host {host!r} is not a name of this machine"
    if origin is None or (site := _place(origin))[0] in allowed - {""}:
        return None
    default = {"http": 80, "https": 443}.get(origin.partition(":")[0])
    if site[0] and (site[0], site[1] or default) == (name, port or default):
        return None
    return f"the page of {origin!r} is of another site"


def own_names() -> frozenset[str]:
    """Names of this machine, in lower case."""
    names = (socket.gethostname(), socket.getfqdn(), socket.gethostname().partition(".")[0], "localhost")
    return frozenset(map(_plain, names))


def _place(url: str) -> tuple[str, int | None]:
    try:
        found = urlsplit(url)
        return _plain(found.hostname or ""), found.port
    except ValueError:
        return "", None


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _plain(name: str) -> str:
    return name.lower().removesuffix(".")


class _Refused(RequestHandler):
    def prepare(self) -> None:
        self.set_status(403)
        self.set_header("Content-Type", "text/plain; charset=utf-8")
        self.finish(
            f"{self.reason}. To allow it, start the run or cluster with cluster.dashboard_names=[NAME], or a scheduler of your "
            f"own with {SETTING}: [NAME] in Dask's configuration.\n"
        )

    def initialize(self, reason: str) -> None:
        self.reason = reason
