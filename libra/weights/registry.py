"""Immutable weight versions on a file system that every worker sees.

::

    ROOT/00000012/model.safetensors   every storage once
    ROOT/00000012/version.json        schema, number, digest, num_bytes, tensors {name: shape, dtype}, tied
    ROOT/00000012/check.json          how an engine shows that it holds this version (`libra.weights.version_check`); may be absent

Invariants
----------
1. A version is whole or absent: it is filled under a temporary name, synced, and renamed as one directory. Killing the
   publisher at any point leaves no version and a temporary directory that nobody reads.
2. A number never changes content. Publishing it again with the same digest returns the version there is; with another
   digest it is a WeightsError. Of two publishers racing for a number exactly one creates it.
3. What `WeightStore.read` returns has the digest announced (unless ``verify=False``), or it raises naming the file.
4. `publish` waits for no reader. A dropped version stays readable to whoever has it mapped.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import socket
import uuid
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from libra.errors import WeightsError
from libra.tensors import digest, untied

logger = logging.getLogger(__name__)

SCHEMA = 1
TENSORS_FILE = "model.safetensors"
FACTS_FILE = "version.json"
CHECK_FILE = "check.json"
FILES = (TENSORS_FILE, FACTS_FILE, CHECK_FILE)
"""All files that a version may have."""


@dataclass(frozen=True, slots=True)
class WeightVersion:
    """A published version: what a future carries in place of tensors.

    Attributes
    ----------
    number : int
        0 for the weights a run starts from.
    digest : str
        `libra.tensors.digest` of its tensors.
    directory : Path
    num_bytes : int
        Of all elements, tied ones once.
    """

    number: int
    digest: str
    directory: Path
    num_bytes: int

    @property
    def path(self) -> Path:
        """The safetensors file."""
        return self.directory / TENSORS_FILE


class WeightStore:
    """Versions under one directory, which is made where it is missing."""

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
        """Make ``tensors`` version ``number``; tensors that share storage are written once.

        Parameters
        ----------
        check : callable, optional
            From the digest to the text of ``check.json``; called while the tensors go to the disk.
        content : str, optional
            Their digest, where the caller has computed it since they last changed.

        Raises
        ------
        WeightsError
            Where the number exists with other content, is negative, or the disk refuses.
        """
        if number < 0:
            raise WeightsError(f"weights: version {number} under {self.root}; allowed are numbers from 0")
        kept, tied = untied(tensors)
        kept = {name: tensor.detach().cpu().contiguous() for name, tensor in kept.items()}
        content = digest(kept) if content is None else content
        if self._directory(number).exists():
            return self._same(number, content)
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in kept.values())
        facts = {
            "schema": SCHEMA,
            "number": number,
            "digest": content,
            "num_bytes": num_bytes,
            "tensors": {
                n: {"shape": list(t.shape), "dtype": str(t.dtype).removeprefix("torch.")} for n, t in kept.items()
            },
            "tied": tied,
        }
        temporary = self.root / f".tmp.{socket.gethostname()}.{os.getpid()}.{uuid.uuid4().hex}"
        try:
            temporary.mkdir()
            with ThreadPoolExecutor(1) as disk:
                written = disk.submit(_save, kept, temporary / TENSORS_FILE)
                _write(temporary / FACTS_FILE, json.dumps(facts))
                if check is not None:
                    _write(temporary / CHECK_FILE, check(content))
                written.result()
            _sync(temporary)
            # A directory never replaces one that is not empty: the rename is the exclusive create.
            temporary.rename(self._directory(number))
            _sync(self.root)
        except OSError as fault:
            if fault.errno in (errno.ENOTEMPTY, errno.EEXIST):
                return self._same(number, content)
            raise WeightsError(f"weights: version {number} could not be written under {self.root}: {fault}") from fault
        except SafetensorError as fault:
            raise WeightsError(f"weights: version {number} could not be written under {self.root}: {fault}") from fault
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        logger.info("weights changed: version %d, %s, %d bytes", number, content, num_bytes)
        return WeightVersion(number, content, self._directory(number), num_bytes)

    def numbers(self) -> list[int]:
        """Every version there is, ascending."""
        return sorted(int(path.name) for path in self.root.iterdir() if path.name.isdigit())

    def get(self, number: int) -> WeightVersion:
        """Version ``number``; WeightsError where it is absent or its facts are not readable."""
        facts = self._facts(number)
        return WeightVersion(number, str(facts["digest"]), self._directory(number), int(str(facts["num_bytes"])))

    def latest(self) -> WeightVersion | None:
        """The highest number, None where nothing was published."""
        numbers = self.numbers()
        return self.get(numbers[-1]) if numbers else None

    def check_text(self, number: int) -> str | None:
        """What ``check.json`` of a version says, None where it has none."""
        try:
            return (self._directory(number) / CHECK_FILE).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None

    def add_check(self, number: int, text: str) -> None:
        """Give a version that was published without one its ``check.json``; one that is there stays."""
        self._facts(number)
        path = self._directory(number) / CHECK_FILE
        temporary = path.with_name(f".{CHECK_FILE}.{uuid.uuid4().hex}")
        try:
            _write(temporary, text)
            os.link(temporary, path)
        except FileExistsError:
            return
        except OSError as fault:
            raise WeightsError(f"weights: {path} could not be written: {fault}") from fault
        finally:
            temporary.unlink(missing_ok=True)

    def tied(self, number: int) -> dict[str, str]:
        """Names that share the elements of another one, which the file has: alias to name."""
        return dict(self._facts(number)["tied"])  # type: ignore[call-overload]

    def read(self, version: int | WeightVersion, *, verify: bool = True) -> dict[str, Tensor]:
        """The tensors of a version, under every name they were published with; tied names share one tensor.

        Memory-mapped: nothing is copied, and without ``verify`` nothing is read before it is used. Treat them as
        read-only. Where ``version`` is a WeightVersion, its digest must be the one on disk.

        Raises
        ------
        WeightsError
            Absent, torn, altered, or not the content announced.
        """
        number = version if isinstance(version, int) else version.number
        facts = self._facts(number)
        path = self._directory(number) / TENSORS_FILE
        announced = str(facts["digest"]) if isinstance(version, int) else version.digest
        if announced != facts["digest"]:
            raise WeightsError(
                f"weights: {path} is digest {facts['digest']}, but version {number} was announced as {announced}"
            )
        try:
            tensors = load_file(path)
        except (OSError, SafetensorError) as fault:
            raise WeightsError(
                f"weights: {path} is torn or not readable ({fault}); announced digest {announced}"
            ) from fault
        if verify:
            got = digest(tensors)
            if got != announced:
                raise WeightsError(f"weights: {path} has digest {got}, announced was {announced}; the file was altered")
        tied: Mapping[str, str] = facts["tied"]  # type: ignore[assignment]
        return {**tensors, **{alias: tensors[name] for alias, name in tied.items()}}

    def drop(self, keep_last: int, pinned: Collection[int] = ()) -> list[int]:
        """Remove all but the ``keep_last`` highest versions and those ``pinned``; the numbers removed.

        Also removes what publishers of this host that are no longer alive left half-written.
        """
        if keep_last < 1:
            raise WeightsError(
                f"weights: keep_last={keep_last}; allowed is 1 or more, so that there is always a version to load"
            )
        dropped = [number for number in self.numbers()[:-keep_last] if number not in pinned]
        for number in dropped:
            # Renamed first: no reader ever sees a version with half its files.
            condemned = self.root / f".tmp.{socket.gethostname()}.{os.getpid()}.{uuid.uuid4().hex}"
            try:
                self._directory(number).rename(condemned)
            except FileNotFoundError:
                continue  # somebody else dropped it
            shutil.rmtree(condemned, ignore_errors=True)
        for leftover in self.root.glob(f".tmp.{socket.gethostname()}.*"):
            if not _alive(int(leftover.name.split(".")[-2])):
                shutil.rmtree(leftover, ignore_errors=True)
        return dropped

    def _directory(self, number: int) -> Path:
        return self.root / f"{number:08d}"

    def _facts(self, number: int) -> dict[str, object]:
        path = self._directory(number) / FACTS_FILE
        try:
            facts: dict[str, object] = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError as fault:
            raise WeightsError(
                f"weights: version {number} is not under {self.root}; there are {self.numbers() or 'none'}"
            ) from fault
        except (OSError, ValueError) as fault:
            raise WeightsError(f"weights: {path} is not readable: {fault}") from fault
        if facts.get("schema") != SCHEMA or facts.get("number") != number:
            raise WeightsError(
                f"weights: {path} says schema {facts.get('schema')}, number {facts.get('number')}; "
                f"expected schema {SCHEMA}, number {number}"
            )
        return facts

    def _same(self, number: int, content: str) -> WeightVersion:
        """The version that exists, where its content is ``content``."""
        existing = self.get(number)
        if existing.digest != content:
            raise WeightsError(
                f"weights: version {number} under {self.root} exists with digest {existing.digest}; "
                f"got tensors of digest {content}. A number never changes content: publish a higher number"
            )
        return existing


def _form(tensor: Tensor) -> dict[str, object]:
    return {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    save_file(tensors, path, metadata={"format": "pt"})
    _sync(path)


def _write(path: Path, text: str) -> None:
    path.write_text(text + "\n", encoding="utf-8")
    _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
