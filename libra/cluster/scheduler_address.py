"""How a cluster that somebody started is reached: an address, or a file with the address and certificates.

`libra cluster slurm CONFIG up` writes the file; every command that takes ``--scheduler`` takes its path instead of an
address. It names the private key, and is as secret as that.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from libra.errors import ClusterError

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
        Of the scheduler, tls://HOST:PORT.
    dashboard : str
        Address of its pages, "" where there are none.
    ca_file, cert_file, key_file : str
        Certificates and key, absolute paths.
    host, pid : str, int
        The machine and the process that keeps the scheduler and the jobs.
    started_s : float
        Seconds since the epoch.
    """

    address: str
    dashboard: str
    ca_file: str
    cert_file: str
    key_file: str
    host: str
    pid: int
    started_s: float

    def write(self, path: Path) -> None:
        """Replace the file in one go; only its owner may read it."""
        write_private(path, json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def read(cls, path: Path) -> Contact:
        """ClusterError where the file is not one that `write` wrote."""
        try:
            return cls(**json.loads(path.read_text()))
        except FileNotFoundError:
            raise ClusterError(
                f"{path}: there is no such file; type libra cluster slurm CONFIG up, which writes it"
            ) from None
        except (OSError, ValueError, TypeError) as error:
            raise ClusterError(
                f"{path}: this is no cluster.json ({error}); type the one that libra cluster slurm CONFIG up wrote"
            ) from error

    def security(self) -> Security:
        """For clients and workers: everything encrypted, both sides authenticated."""
        from distributed.security import Security

        names = ("scheduler", "worker", "client")
        files = {f"tls_{name}_cert": self.cert_file for name in names} | {
            f"tls_{name}_key": self.key_file for name in names
        }
        return Security(tls_ca_file=self.ca_file, require_encryption=True, **files)


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner may read, whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.touch(mode=0o600)
    temporary.write_text(text)
    temporary.replace(path)


def connect(scheduler: str, *, set_as_default: bool = True) -> Client:
    """A client of the scheduler at an address, or of the one whose ``cluster.json`` is at that path.

    ClusterError where the file cannot be read or certificates are missing; OSError, TimeoutError or ValueError where nobody
    answers.
    """
    from distributed import Client

    options: dict[str, Any] = {"timeout": CONNECT_TIMEOUT_S, "set_as_default": set_as_default}
    if "://" not in scheduler and (scheduler.endswith(".json") or Path(scheduler).is_file()):
        contact = Contact.read(Path(scheduler))
        return Client(contact.address, security=contact.security(), **options)  # type: ignore[no-untyped-call]
    try:
        return Client(scheduler, **options)  # type: ignore[no-untyped-call]
    except TypeError as error:  # what distributed raises where no certificates are configured
        raise ClusterError(
            f"{scheduler}: this scheduler wants certificates ({error}); type the path of its cluster.json instead, or set "
            "distributed.comm.tls in Dask's configuration"
        ) from error
