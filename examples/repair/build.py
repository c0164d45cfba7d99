"""Makes repair tasks: bugs that the library's own tests catch.

::

    python -m examples.repair.build --sdist inflection-0.5.1.tar.gz --out repair.jsonl
    libra run examples/repair.yaml environment.args.tasks=repair.jsonl

A source package comes from ``pip download --no-binary :all: --no-deps NAME``. Any other library is
a ``--folder`` with its modules and tests; the tasks that ship come from
``workflows/repair_libraries``. The file has a line for each library (name, licence, files, tests)
and one for each bug: where it is, what it replaces, what the tests that fail with it say, and which
tests pass with and without it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from examples.repair.bugs import Bug, bugs_of
from examples.repair.library import Library, failures, from_folder, from_sdist, opened
from libra.envs.sandbox import MEGABYTE, Limits, opener
from libra.errors import ConfigError

MOST_BUGS = 200
LIMITS = Limits(memory_bytes=512 * MEGABYTE, cpu_s=20)


def tasks_of(
    library: Library, *, timeout_s: float = 3.0, most: int = MOST_BUGS, isolation: str = "bubblewrap"
) -> Iterator[Any]:
    """The lines of a library: itself, then a line for each bug that makes at least one of its tests
    fail, and not all.

    If there are more than ``most`` possible bugs, they are sampled at even steps. ConfigError if no
    test passes without a bug.
    """
    with opened(opener(isolation), LIMITS, f"repair: {library.name}") as session:
        sound = failures(session, library.files, library.tests, timeout_s)
        passing = {name for name, said in sound.items() if not said}
        if not passing:
            said = "; ".join(list(sound.values())[:2]) or "the run did not end"
            raise ConfigError(
                f"{library.name}: none of its tests passes in a sandbox with the standard library ({said})"
            )
        yield {"library": library.name, **{key: value for key, value in asdict(library).items() if key != "name"}}
        bugs = [(path, bug) for path in sorted(library.files) for bug in bugs_of(library.files[path])]
        for path, bug in bugs[:: -(-len(bugs) // most) or 1]:
            task = _task(library, path, bug, failures(session, *_broken(library, path, bug), timeout_s), passing)
            if task is not None:
                yield task


def _broken(library: Library, path: str, bug: Bug) -> tuple[dict[str, str], Any]:
    return {**library.files, path: bug.put_in(library.files[path])}, library.tests


def _task(library: Library, path: str, bug: Bug, said: dict[str, str], passing: set[str]) -> Any:
    failing = {name: said[name] for name in sorted(passing & set(said)) if said[name]}
    if not failing or len(failing) == len(passing) or not passing <= set(said):
        return None
    return {
        "library": library.name,
        "path": path,
        **bug._asdict(),
        "failing": failing,
        "passing": sorted(passing - set(failing)),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sdist", type=Path, action="append", default=[], help="a .tar.gz of PyPI; may be repeated")
    parser.add_argument(
        "--folder", type=Path, action="append", default=[], help="a folder of a library; may be repeated"
    )
    parser.add_argument("--out", type=Path, required=True, help="the file of tasks, JSON lines")
    parser.add_argument("--most", type=int, default=MOST_BUGS, help="bugs that are tried in each library")
    chosen = parser.parse_args(arguments)
    libraries = [*map(from_sdist, chosen.sdist), *map(from_folder, chosen.folder)]
    if not libraries:
        parser.error("no library is given; type --sdist PACKAGE.tar.gz or --folder FOLDER")
    lines = [line for library in libraries for line in tasks_of(library, most=chosen.most)]
    chosen.out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    print(f"{chosen.out}: {len(lines) - len(libraries)} bugs in {len(libraries)} libraries")


if __name__ == "__main__":
    main()
