"""Connections to a cluster or a running run: keys, files that name the scheduler, and workers.

Scheduler, workers and clients show one self-signed certificate, the only authority that they
accept. A process with its key may connect and run code in the cluster; all others are refused.
`libra cluster slurm CONFIG up` writes ``cluster.json``. ``--scheduler`` takes the path of that
file, or an address, whose key is in Dask's configuration.

Invariants
----------
1. ``scheduler.json`` of a run exists from the moment the run takes requests until its driver ends.
   After a driver was killed the file stays, and its address may not answer.
2. Only their owner may read ``scheduler.json`` and ``cluster.json``, because they hold a key or
   name its file.
"""

from __future__ import annotations

import asyncio
import datetime
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from libra.cluster.settings import DASK_SETTINGS, MESSAGE_LOG
from libra.errors import ClusterError, RunDirectoryError, shell_path

if TYPE_CHECKING:
    from distributed import Client
    from distributed.security import Security

FILE = "scheduler.json"
CONNECT_TIMEOUT_S = 10
VALID_DAYS = 3650
"""Longer than a cluster runs: connections made later would be refused."""
CERTIFICATE_FILE, KEY_FILE = "cert.pem", "key.pem"
_ROLES = ("scheduler", "worker", "client")


def new_security() -> Security:
    """A new key (P-256) and certificate, in memory only."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "libra")])
    now = datetime.datetime.now(tz=datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))  # clocks of machines differ
        .not_valid_after(now + datetime.timedelta(days=VALID_DAYS))
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return security_of(certificate.public_bytes(serialization.Encoding.PEM).decode(), private.decode())


def security_of(certificate: str, key: str, authority: str | None = None) -> Security:
    """Mutual TLS with one certificate and key, each a PEM text or a path. ``authority`` is the
    certificate that signed a peer's, by default the certificate itself."""
    from distributed.security import Security

    files = {f"tls_{role}_cert": certificate for role in _ROLES} | {f"tls_{role}_key": key for role in _ROLES}
    return Security(tls_ca_file=authority or certificate, require_encryption=True, **files)


def shown_by(security: Security) -> tuple[str, str, str]:
    """Certificate, key and authority of a client, each a PEM text or a path; "" if it has none."""
    config = security.get_tls_config_for_role("client")
    return config["cert"] or "", config["key"] or "", config["ca_file"] or ""


def make_files(directory: Path) -> None:
    """Write a new key and certificate into ``directory``, which only its owner can read
    afterwards."""
    directory.mkdir(parents=True, exist_ok=True)
    directory.chmod(0o700)
    certificate, key, _ = shown_by(new_security())
    write_private(directory / CERTIFICATE_FILE, certificate)
    write_private(directory / KEY_FILE, key)


def security_in(directory: Path) -> Security:
    """The `Security` from the files of `make_files`."""
    return security_of(str(directory / CERTIFICATE_FILE), str(directory / KEY_FILE))


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner may read, atomically."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)  # left by a process that died: its mode could be another
    temporary.touch(mode=0o600)
    temporary.write_text(text)
    temporary.replace(path)


@dataclass(frozen=True, slots=True)
class Contact:
    """The content of ``cluster.json``."""

    address: str  # tls://HOST:PORT of the scheduler
    dashboard: str  # its address, "" without one
    cert_file: str  # absolute paths
    key_file: str
    host: str  # machine and process of the scheduler, which keeps the jobs running
    pid: int
    started_s: float  # since the epoch

    def write(self, path: Path) -> None:
        """Replace the file atomically; only its owner may read it."""
        write_private(path, msgspec.json.encode(self).decode() + "\n")

    @classmethod
    def read(cls, path: Path) -> Contact:
        """The content of the file; ClusterError if `write` did not write it."""
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except (OSError, ValueError) as error:
            raise ClusterError(
                f"{path}: not a cluster.json ({error}); type libra cluster slurm CONFIG up, which writes one in slurm.dir"
            ) from error

    def security(self) -> Security:
        """Key and certificate for clients and workers."""
        return security_of(self.cert_file, self.key_file)


@dataclass(frozen=True, slots=True)
class RunContact:
    """The content of ``RUN/scheduler.json``."""

    run: str
    epoch: int  # this start of the run
    scheduler: str  # value of ``--scheduler``: an address, or the path of a cluster.json
    hybrid_workers: int  # workers that can change roles
    certificate: str = ""  # the driver's, as PEM texts or paths; "" for an open scheduler
    key: str = field(default="", repr=False)
    authority: str = ""

    def security(self) -> Security | None:
        """Key and certificate for other clients of the scheduler; None for an open scheduler."""
        return security_of(self.certificate, self.key, self.authority) if self.key else None

    def write(self, directory: Path) -> None:
        """Write the file into the run's directory."""
        write_private(directory / FILE, msgspec.json.encode(self).decode() + "\n")


def connect(scheduler: str, *, security: Security | None = None, set_as_default: bool = True) -> Client:
    """A client of a scheduler, given by its address or the path of its ``cluster.json``.

    ``security`` has key and certificate for an address, by default from Dask's configuration.
    ClusterError if the file cannot be read or certificates are missing; OSError, TimeoutError or
    ValueError if no scheduler answers.
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
    """OSError if no Dask scheduler answers. Dask's client would wait long for another program, or
    read its first bytes as lengths."""
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
        except Exception as error:  # an answer that is not Dask's
            raise OSError(f"another program answers there: {type(error).__name__}") from error


def present_workers(client: Client) -> dict[str, dict[str, Any]]:
    """Facts of every worker by address: ``name``, ``nthreads``, ``resources``, ``host``, ``nanny``,
    ... Every 2 s Dask overwrites the answer of ``Client.scheduler_info`` with an answer without
    workers."""
    rpc: Any = client.scheduler
    identity: dict[str, Any] = client.sync(rpc.identity, n_workers=-1)
    workers: dict[str, dict[str, Any]] = identity["workers"]
    return workers


def forget(directory: Path) -> None:
    """Remove the file, if there is one."""
    (directory / FILE).unlink(missing_ok=True)


def reach(run_dir: Path, scheduler: str | None = None) -> tuple[Client, RunContact]:
    """A client of the scheduler of the run in ``run_dir``, and the contact of that run.

    ``scheduler`` is another address of the same scheduler. RunDirectoryError without a run,
    ClusterError if it is not running.
    """
    if not (run_dir / "config.resolved.yaml").is_file():
        raise RunDirectoryError(
            f"{run_dir}: no run here, it has no config.resolved.yaml; type the directory of a run, such as runs/NAME"
        )
    again = f"type libra resume {shell_path(run_dir)} to continue it"
    try:
        contact = msgspec.json.decode((run_dir / FILE).read_bytes(), type=RunContact)
    except FileNotFoundError:
        raise ClusterError(
            f"{run_dir}: this run is not running, or has not started its first iteration; {again}"
        ) from None
    except (OSError, ValueError) as error:
        raise ClusterError(
            f"{run_dir / FILE}: no address of the run's scheduler can be read ({error}); {again}"
        ) from error
    try:
        return connect(scheduler or contact.scheduler, security=contact.security(), set_as_default=False), contact
    except (OSError, TimeoutError, ValueError) as error:
        raise ClusterError(
            f"{run_dir}: this run is not running, no scheduler answers at {scheduler or contact.scheduler}; {again}"
        ) from error
