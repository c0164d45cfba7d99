"""Connecting to a running cluster: by an address, or by a file with the address and certificates.

`libra cluster slurm CONFIG up` writes the file; every command that takes ``--scheduler`` takes its path instead of an
address. It names the private key, and is as secret. For an address, the key is the one of Dask's configuration.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from libra.cluster.certificates import security_of, write_private
from libra.cluster.settings import DASK_SETTINGS, MESSAGE_LOG
from libra.errors import ClusterError
from libra.seals import parsed_json

if TYPE_CHECKING:
    from distributed import Client
    from distributed.security import Security

CONNECT_TIMEOUT_S = 10


@dataclass(frozen=True, slots=True)
class Contact:
    """What ``cluster.json`` holds.

    Attributes
    ----------
    address : str
        tls://HOST:PORT of the scheduler.
    dashboard : str
        Address of its dashboard, "" without one.
    cert_file, key_file : str
        Certificate and key, absolute paths.
    host, pid : str, int
        Machine and process of the scheduler, which keeps the jobs running.
    started_s : float
        Seconds since the epoch.
    """

    address: str
    dashboard: str
    cert_file: str
    key_file: str
    host: str
    pid: int
    started_s: float

    def write(self, path: Path) -> None:
        """Replace the file atomically; only its owner may read it."""
        write_private(path, json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def read(cls, path: Path) -> Contact:
        """ClusterError if the file is not one that `write` wrote."""
        try:
            values = parsed_json(path.read_text())
            values.pop("ca_file", None)  # of an older Libra: the certificate itself
            return cls(**values)
        except FileNotFoundError:
            raise ClusterError(
                f"{path}: there is no such file; type libra cluster slurm CONFIG up, which writes it"
            ) from None
        except (OSError, ValueError, TypeError) as error:
            raise ClusterError(
                f"{path}: not a cluster.json ({error}); type the path of the one that libra cluster slurm CONFIG up wrote"
            ) from error

    def security(self) -> Security:
        """For clients and workers."""
        return security_of(self.cert_file, self.key_file)


def connect(scheduler: str, *, security: Security | None = None, set_as_default: bool = True) -> Client:
    """A client of the scheduler at an address, or of the one whose ``cluster.json`` is at that path.

    ``security``: key and certificate for an address; None: those of Dask's configuration, if there are any. ClusterError if
    the file cannot be read or certificates are missing; OSError, TimeoutError or ValueError if no scheduler answers.
    """
    import dask.config
    from distributed import Client

    dask.config.set({MESSAGE_LOG: DASK_SETTINGS[MESSAGE_LOG]})  # this process also keeps the graphs that it sends
    options: dict[str, Any] = {"timeout": CONNECT_TIMEOUT_S, "set_as_default": set_as_default}
    if "://" not in scheduler and (scheduler.endswith(".json") or Path(scheduler).is_file()):
        contact = Contact.read(Path(scheduler))
        return Client(contact.address, security=contact.security(), **options)
    try:
        _ask(scheduler, security)
        return Client(scheduler, security=security, **options)
    except TypeError as error:  # what distributed raises if no certificates are configured
        raise ClusterError(
            f"{scheduler}: this scheduler requires certificates ({error}); type the path of its cluster.json instead, or first "
            "export DASK_CONFIG=DIR/dask.yaml of libra cluster tls DIR"
        ) from error


def _ask(address: str, security: Security | None) -> None:
    """OSError if no Dask scheduler answers there: a client waits long for another program, or takes its first bytes for lengths."""
    from concurrent.futures import ThreadPoolExecutor

    from distributed import Security, rpc

    async def identity() -> None:
        arguments = (security or Security()).get_connection_args("client")
        async with rpc(address, connection_args=arguments) as scheduler:
            answer = await asyncio.wait_for(scheduler.identity(), CONNECT_TIMEOUT_S)
            if answer["type"] != "Scheduler":
                raise OSError(f"a Dask {answer['type'].lower()} answers there")

    with ThreadPoolExecutor(1) as thread:  # this one may run an event loop, as a notebook's does
        try:
            thread.submit(asyncio.run, identity()).result()
        except TimeoutError as error:
            raise TimeoutError(str(error) or f"nothing within {CONNECT_TIMEOUT_S} s") from None
        except (TypeError, OSError, ValueError):
            raise
        except Exception as error:  # whatever another program's answer leads to
            raise OSError(f"another program answers there: {type(error).__name__}") from error
