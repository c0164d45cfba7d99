"""A file that a command writes: whole, or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from libra.errors import ConfigError, StoreError, disk_refusal


@contextlib.contextmanager
def written(output: Path, option: str) -> Iterator[Path]:
    """A path that replaces ``output`` at the end; if that is impossible, ConfigError and no file."""
    unfinished = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        yield unfinished
        unfinished.replace(output)
    except StoreError:
        raise  # of a log that is read meanwhile: it is an OSError, too
    except OSError as error:
        raise ConfigError(
            f"{option} {output}: {disk_refusal(output, error)}; name another file with {option} FILE"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
