"""Key and certificate of one cluster: a process with the key may connect and run code there; all others are refused.

Scheduler, workers and clients show the same self-signed certificate, which is also the only authority that they accept. So a
certificate of another cluster, of another start, or of a public authority is refused.
"""

from __future__ import annotations

import datetime
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distributed.security import Security

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
    """Encryption with both sides proven by one certificate and key, each a PEM text or a path.

    ``authority``: the certificate that has to have signed a peer's; None: the certificate itself.
    """
    from distributed.security import Security

    files = {f"tls_{role}_cert": certificate for role in _ROLES} | {f"tls_{role}_key": key for role in _ROLES}
    return Security(tls_ca_file=authority or certificate, require_encryption=True, **files)


def shown_by(security: Security) -> tuple[str, str, str]:
    """Certificate, key and authority of a client, each a PEM text or a path; "" if it has none."""
    config = security.get_tls_config_for_role("client")
    return config["cert"] or "", config["key"] or "", config["ca_file"] or ""


def make_files(directory: Path) -> None:
    """A new key and certificate in ``directory``, which only its owner can read from then on."""
    directory.mkdir(parents=True, exist_ok=True)
    directory.chmod(0o700)
    certificate, key, _ = shown_by(new_security())
    write_private(directory / CERTIFICATE_FILE, certificate)
    write_private(directory / KEY_FILE, key)


def security_in(directory: Path) -> Security:
    """What `make_files` wrote there, by its paths."""
    return security_of(str(directory / CERTIFICATE_FILE), str(directory / KEY_FILE))


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner may read, whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)  # left by a process that died: its mode could be another
    temporary.touch(mode=0o600)
    temporary.write_text(text)
    temporary.replace(path)
