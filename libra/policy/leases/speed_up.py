"""How much faster an action is with more cores: declared curves, and curves measured from actions that have ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import exp, isfinite, log

from libra.errors import ConfigError

SAMPLES = 4
"""Actions of each size that are measured before a measured curve is used."""
NEWEST = 0.1
"""Weight of the newest action in a mean, once there are more than its inverse."""
LEAST_S = 1e-4
"""Actions are taken to last at least so long: the logarithm of their seconds is averaged."""


class SpeedUp:
    """A curve: (cores, speed) for every legal number of cores, the least first with speed 1.

    Seconds with ``c`` cores are those with the least, divided by ``speed(c)``.

    Parameters
    ----------
    least, most : int
        Cores.
    declared : sequence of float, mapping of int to float, or "measure"
        Speeds of ``least, least + 1, ..., most`` cores; or of the sizes that are legal, by cores; or "measure": sizes are doubled
        from the least to the most, and their speeds are learned.
    where : str
        The tool's name, for errors.

    Raises
    ------
    ConfigError
        A speed is not above 0, or falls as cores are added; sizes are missing, or outside of ``least`` to ``most``.
    """

    def __init__(
        self, least: int, most: int, declared: Sequence[float] | Mapping[int, float] | str, where: str = "curve"
    ) -> None:
        self.measured = declared == "measure"
        if isinstance(declared, str):
            if not self.measured:
                raise ConfigError(
                    f"{where}: elastic is {declared!r}; type the speeds, e.g. {_example(least, most)}, or 'measure'"
                )
            self.sizes = _doubled(least, most)
            self._speeds = {least: 1.0}
            self._logs: dict[int, tuple[int, float]] = {}
            return
        points = dict(declared) if isinstance(declared, Mapping) else _numbered(least, most, declared, where)
        _check(points, least, most, where)
        self.sizes = tuple(sorted(points))
        self._speeds = {size: points[size] / points[least] for size in self.sizes}

    @property
    def known(self) -> tuple[int, ...]:
        """Sizes whose speed is known, ascending."""
        return tuple(size for size in self.sizes if size in self._speeds)

    def speed(self, cores: int) -> float:
        """Of the largest known size up to ``cores``; at least 1."""
        return max((self._speeds[size] for size in self.known if size <= cores), default=1.0)

    def unmeasured(self, free_cores: int) -> int | None:
        """The size of at most ``free_cores`` that has been measured least often, while one has too few samples; None: none."""
        if not self.measured:
            return None
        counts = [(self._logs.get(size, (0, 0.0))[0], size) for size in self.sizes if size <= free_cores]
        count, size = min(counts, default=(SAMPLES, 0))
        return size if count < SAMPLES else None

    def ended(self, cores: int, seconds: float) -> None:
        """An action with ``cores`` cores took ``seconds``; a declared curve does not change."""
        if not self.measured or cores not in self.sizes:
            return
        count, mean = self._logs.get(cores, (0, 0.0))
        value = log(max(LEAST_S, seconds))
        self._logs[cores] = (count + 1, mean + (value - mean) * max(NEWEST, 1 / (count + 1)))
        base = self._logs.get(self.sizes[0], (0, 0.0))
        if base[0] < SAMPLES:
            return
        fastest = 1.0
        self._speeds = {self.sizes[0]: 1.0}
        for size in self.sizes[1:]:
            count, mean = self._logs.get(size, (0, 0.0))
            if count >= SAMPLES:
                fastest = max(fastest, exp(base[1] - mean))
                self._speeds[size] = round(fastest, 9)


def _doubled(least: int, most: int) -> tuple[int, ...]:
    sizes, size = [], least
    while size < most:
        sizes.append(size)
        size *= 2
    return (*sizes, most)


def _numbered(least: int, most: int, speeds: Sequence[float], where: str) -> dict[int, float]:
    if len(speeds) != most - least + 1:
        raise ConfigError(
            f"{where}: elastic has {len(speeds)} speeds; cores=({least}, {most}) have {most - least + 1} sizes, type one speed "
            f"for each, e.g. {_example(least, most)}, or those of some sizes, e.g. {{{least}: 1.0, {most}: {most / least:g}}}"
        )
    return dict(zip(range(least, most + 1), speeds, strict=True))


def _check(points: Mapping[int, float], least: int, most: int, where: str) -> None:
    outside = [size for size in points if not isinstance(size, int) or not least <= size <= most]
    if outside or least not in points:
        wrong = f"has {outside[0]!r}" if outside else f"lacks {least}"
        raise ConfigError(
            f"{where}: elastic {wrong}; its sizes are cores from {least} to {most}, with {least} among them"
        )
    before = 0.0
    for size in sorted(points):
        speed = points[size]
        if not (isinstance(speed, int | float) and isfinite(speed) and speed > 0):
            raise ConfigError(
                f"{where}: the speed with {size} cores is {speed!r}; type a number above 0, such as {size / least:g}"
            )
        if speed < before:
            raise ConfigError(
                f"{where}: the speed falls to {speed:g} with {size} cores, from {before:g}; speeds never fall as cores are "
                f"added: type {before:g} or more, or leave sizes out that do not help"
            )
        before = speed


def _example(least: int, most: int) -> str:
    shown = ", ".join(f"{size / least:g}" for size in range(least, min(most, least + 3) + 1))
    return f"[{shown}, ...]" if most > least + 3 else f"[{shown}]"
