"""A library to repair: its files, its own tests, and what its tests say in a sandbox."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from libra.envs.sandbox import Finished, Limits, Sandbox, SandboxFailed
from libra.errors import ConfigError, EnvironmentFault

MAX_FILE_BYTES = 100_000
RUNNER = Path(__file__).with_name("library_tests.py")
_NO_LIBRARY = frozenset({"setup.py", "conftest.py", "noxfile.py", "conf.py"})
_NO_FOLDERS = frozenset({"docs", "doc", "examples", "benchmarks", "tools", "scripts", ".github"})


@dataclass(frozen=True, slots=True)
class Library:
    """Texts by path below the repository: ``files`` may be edited, ``tests`` may not."""

    name: str
    files: Mapping[str, str]
    tests: Mapping[str, str]
    licence: str = ""


def from_folder(folder: Path) -> Library:
    """The library whose modules and tests lie in a folder."""
    texts = {path.relative_to(folder).as_posix(): path.read_text() for path in sorted(folder.rglob("*.py"))}
    return _library(folder.name, texts, "", str(folder))


def from_sdist(path: Path) -> Library:
    """The library of a source package of PyPI (a .tar.gz); ConfigError if it has no module or no
    test.

    Only Python files of up to `MAX_FILE_BYTES` bytes are read, and nothing of it is run here.
    """
    texts, licence = {}, ""
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                parts = PurePosixPath(member.name).parts[1:]
                if not parts or not member.isfile() or member.size > MAX_FILE_BYTES or ".." in parts:
                    continue
                file = archive.extractfile(member)
                data = b"" if file is None else file.read()
                if parts == ("PKG-INFO",):
                    licence = _licence(data.decode(errors="replace"))
                elif parts[-1].endswith(".py"):
                    texts["/".join(parts)] = data.decode(errors="replace")
    except (OSError, tarfile.TarError) as error:
        raise ConfigError(f"sdist {path}: cannot be read ({error}); give the .tar.gz of a source package") from error
    return _library(path.name.removesuffix(".tar.gz"), texts, licence, str(path))


def failures(session: Sandbox, files: Mapping[str, str], tests: Mapping[str, str], timeout_s: float) -> dict[str, str]:
    """The message of each test by its name, "" if it passed; empty if the program did not come to
    its end, e.g. by a loop."""
    return said_by(
        session.call(
            RUNNER.read_text(), "run_tests", [dict(files), dict(tests)], timeout_s=timeout_s, result_bytes=2**22
        )
    )


def said_by(finished: Finished) -> dict[str, str]:
    """The runner's result, as far as it is one."""
    try:
        value = json.loads(finished.result or "{}") if finished.exit_code == 0 else {}
    except (ValueError, RecursionError):
        return {}
    return {str(name): str(said) for name, said in value.items()} if isinstance(value, dict) else {}


def opened(start: Callable[[Limits], Sandbox], limits: Limits, what: str) -> Sandbox:
    """A sandbox; EnvironmentFault, which begins with ``what``, if the machine gives none."""
    try:
        return start(limits)
    except SandboxFailed as error:
        raise EnvironmentFault(f"{what}: cannot start a sandbox: {error}") from error


def _library(name: str, texts: Mapping[str, str], licence: str, where: str) -> Library:
    tests = {path: text for path, text in texts.items() if _is_test(path)}
    files = {path: text for path, text in texts.items() if path not in tests and _is_library(path)}
    for kind, found in (("module", files), ("test", tests)):
        if not found:
            raise ConfigError(f"{where}: no {kind} found; give the source package of a library that ships its tests")
    return Library(name, files, tests, licence)


def _is_test(path: str) -> bool:
    *folders, name = PurePosixPath(path).parts
    return name.startswith("test") or name.endswith("_test.py") or bool({"test", "tests"} & set(folders))


def _is_library(path: str) -> bool:
    *folders, name = PurePosixPath(path).parts
    return name not in _NO_LIBRARY and not _NO_FOLDERS & set(folders)


def _licence(metadata: str) -> str:
    fields = dict(line.split(": ", 1) for line in metadata.split("\n\n")[0].splitlines() if ": " in line)
    return fields.get("License-Expression") or fields.get("License") or "not stated"
