"""Immutable weight versions on a file system.

::

    ROOT/00000012/model.safetensors   every storage once
    ROOT/00000012/version.json        a `Manifest`
    ROOT/00000012/check.json          a `libra.weights.version_check.VersionCheck`; may be absent

Invariants
----------
1. A version is whole or absent: it is filled under a temporary name, synced, and renamed as one
   directory. A killed publisher leaves only a temporary directory that nothing reads.
2. A number never changes content: publishing it again with the same digest returns the existing
   version, with another digest raises WeightsError. Of two publishers that race for a number
   exactly one creates it.
3. `WeightStore.read` returns tensors with the announced digest (unless ``verify=False``) or raises.
4. `publish` waits for no reader. A dropped version stays readable to processes that have it mapped.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import socket
import uuid
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from libra.errors import WeightsError, disk_refusal
from libra.seals import sealed_text, unseal
from libra.tensor_files import CHECK_FILE, MANIFEST_FILE, TENSORS_FILE, sync
from libra.tensors import digest, untied

logger = logging.getLogger(__name__)

SCHEMA = 1


class TensorFacts(msgspec.Struct, frozen=True):
    """Shape and dtype ("bfloat16") of a tensor."""

    shape: tuple[int, ...]
    dtype: str


class Manifest(msgspec.Struct, frozen=True):
    """Content of ``version.json``, as in `WeightVersion`; ``tied`` maps aliases to tensors."""

    schema: int
    number: int
    digest: str
    num_bytes: int
    tensors: dict[str, TensorFacts]
    tied: dict[str, str]


@dataclass(frozen=True, slots=True)
class WeightVersion:
    """Reference to a published version, which futures carry in place of tensors."""

    number: int  # 0 for the initial weights
    digest: str  # `libra.tensors.digest`
    directory: Path
    num_bytes: int  # all elements, tied tensors once

    @property
    def path(self) -> Path:
        return self.directory / TENSORS_FILE


class WeightStore:
    """Versions under one directory, which is created if missing."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        self.root.mkdir(parents=True, exist_ok=True)

    def publish(
        self,
        number: int,
        tensors: Mapping[str, Tensor],
        *,
        check: Callable[[str], str] | None = None,
        content: str | None = None,
    ) -> WeightVersion:
        """Publish ``tensors`` as version ``number``; tensors that share storage are written once.

        ``check`` makes the text of ``check.json`` from the digest, while tensors are written.
        ``content`` is the digest, if known. Raises WeightsError if the number is negative or has
        other content, or the disk fails.
        """
        if number < 0:
            raise WeightsError(f"weights: version {number} under {self.root}; allowed are numbers from 0")
        kept, tied = untied(tensors)
        kept = {name: tensor.detach().cpu().contiguous() for name, tensor in kept.items()}
        if self.directory(number).exists():
            return self._same(number, digest(kept))
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in kept.values())
        facts = {name: TensorFacts(tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in kept.items()}
        temporary = self.temporary()
        try:
            temporary.mkdir()
            with ThreadPoolExecutor(3) as disk:  # each file waits for the disk, in parallel
                written = [disk.submit(_save, kept, temporary / TENSORS_FILE)]
                content = digest(kept) if content is None else content  # while they are written
                manifest = Manifest(SCHEMA, number, content, num_bytes, facts, tied)
                text = sealed_text(msgspec.to_builtins(manifest))
                written.append(disk.submit(_write, temporary / MANIFEST_FILE, text))
                if check is not None:
                    written.append(disk.submit(_write, temporary / CHECK_FILE, check(content)))
                for each in written:
                    each.result()
            sync(temporary)
            version = self.adopt(temporary, number, content)
            sync(self.root)
        except (OSError, SafetensorError) as error:
            raise WeightsError(f"weights: version {number}: {disk_refusal(self.root / str(number), error)}") from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        logger.info("weights changed: version %d, %s, %d bytes", number, content, num_bytes)
        return version

    def adopt(self, temporary: Path, number: int, content: str) -> WeightVersion:
        """Rename a complete version, filled in `temporary`; a faster process's version is kept."""
        try:
            # Renaming never replaces a nonempty directory, so this is an exclusive create.
            temporary.rename(self.directory(number))
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        return self._same(number, content)

    def temporary(self) -> Path:
        return self.root / f".tmp.{socket.gethostname()}.{os.getpid()}.{uuid.uuid4().hex}"

    def numbers(self) -> list[int]:
        return sorted(int(path.name) for path in self.root.iterdir() if path.name.isdigit())

    def get(self, number: int) -> WeightVersion:
        """Version ``number``. Raises WeightsError if it is absent or its manifest unreadable."""
        manifest = self.manifest(number)
        return WeightVersion(number, manifest.digest, self.directory(number), manifest.num_bytes)

    def latest(self) -> WeightVersion | None:
        numbers = self.numbers()
        return self.get(numbers[-1]) if numbers else None

    def check_text(self, number: int) -> str | None:
        """The text of a version's ``check.json``; None if absent."""
        try:
            return (self.directory(number) / CHECK_FILE).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None

    def read(self, version: int | WeightVersion, *, verify: bool = True) -> dict[str, Tensor]:
        """A version's tensors under all published names; tied names share a tensor.

        Memory-mapped and read-only: without ``verify`` bytes are read on use. Raises WeightsError
        if the version is absent, torn, altered, or differs from the announced one.
        """
        number = version if isinstance(version, int) else version.number
        manifest = self.manifest(number)
        path = self.directory(number) / TENSORS_FILE
        announced = manifest.digest if isinstance(version, int) else version.digest
        if announced != manifest.digest:
            raise WeightsError(
                f"weights: {path} is digest {manifest.digest}, but version {number} was announced as {announced}"
            )
        tensors = load_tensors(path, announced, verify=verify)
        return {**tensors, **{alias: tensors[name] for alias, name in manifest.tied.items()}}

    def drop(self, keep_last: int, pinned: Collection[int] = ()) -> list[int]:
        """Remove versions except the ``keep_last`` highest and ``pinned``; returns removed numbers.

        Also removes incomplete versions of dead processes of this machine.
        """
        if keep_last < 1:
            raise WeightsError(
                f"weights: keep_last={keep_last}; type 1 or more, so that there is always a version to load"
            )
        dropped = [number for number in self.numbers()[:-keep_last] if number not in pinned]
        for number in dropped:
            condemned = self.temporary()  # renamed first: no reader ever sees a version with half its files
            try:
                self.directory(number).rename(condemned)
            except FileNotFoundError:
                continue  # another process dropped it
            shutil.rmtree(condemned, ignore_errors=True)
        for leftover in self.root.glob(f".tmp.{socket.gethostname()}.*"):
            if not _is_alive(int(leftover.name.split(".")[-2])):
                shutil.rmtree(leftover, ignore_errors=True)
        return dropped

    def directory(self, number: int) -> Path:
        return self.root / f"{number:08d}"

    def manifest(self, number: int) -> Manifest:
        """The manifest of a version. Raises WeightsError if it is absent or unreadable."""
        path = self.directory(number) / MANIFEST_FILE
        try:
            return parse_manifest(path.read_bytes(), number, path)
        except FileNotFoundError as error:
            raise WeightsError(
                f"weights: version {number} is not under {self.root}; there are {self.numbers() or 'none'}"
            ) from error
        except OSError as error:
            raise WeightsError(f"weights: {path} is not readable: {error}") from error

    def _same(self, number: int, content: str) -> WeightVersion:
        existing = self.get(number)
        if existing.digest != content:
            raise WeightsError(
                f"weights: version {number} under {self.root} exists with digest {existing.digest}; "
                f"got tensors of digest {content}. A number never changes content: publish a higher number"
            )
        return existing


def parse_manifest(text: bytes, number: int, where: object) -> Manifest:
    """The manifest of version ``number``. Raises WeightsError naming ``where`` if invalid."""
    try:
        manifest = msgspec.convert(unseal(text), Manifest)
    except (msgspec.ValidationError, ValueError) as error:
        raise WeightsError(f"weights: {where} is not readable: {error}") from error
    if manifest.schema != SCHEMA or manifest.number != number:
        raise WeightsError(
            f"weights: {where} has schema {manifest.schema}, number {manifest.number}; "
            f"expected schema {SCHEMA}, number {number}"
        )
    return manifest


def load_tensors(path: Path, announced: str, *, verify: bool = True) -> dict[str, Tensor]:
    """A file's tensors, memory-mapped. Raises WeightsError if torn or if the digest differs."""
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except (OSError, SafetensorError) as error:
        raise WeightsError(
            f"weights: {path} is torn or not readable ({error}); announced digest {announced}"
        ) from error
    if verify and (found := digest(tensors)) != announced:
        raise WeightsError(f"weights: {path} has digest {found}, announced was {announced}; the file was altered")
    return tensors


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    save_file(tensors, path, metadata={"format": "pt"})
    sync(path)


def _write(path: Path, text: str) -> None:
    path.write_text(text + "\n", encoding="utf-8")
    sync(path)
