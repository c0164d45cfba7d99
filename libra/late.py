"""What a reward function returns for a reward that comes later."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Late:
    """What a reward function returns in place of a number that comes later, by `libra.deliver`.

    A weighted sum with at most one late term is late too; ``trainer.late`` says what a run makes of it.

    Attributes
    ----------
    fast : float or None
        A provisional value at once. None: there is none.
    offset, factor : float
        The reward is ``offset + factor x value`` of the value that is provisional, or delivered.
    """

    fast: float | None = None
    offset: float = 0.0
    factor: float = 1.0

    @property
    def provisional(self) -> float | None:
        """The reward until the value is delivered; None: there is none."""
        return None if self.fast is None else self.offset + self.factor * self.fast

    def __add__(self, other: object) -> Late:
        if isinstance(other, Late):
            raise TypeError("two rewards of a sum are libra.Late; one may be, because one value is delivered")
        if not isinstance(other, int | float):
            return NotImplemented
        return Late(self.fast, self.offset + float(other), self.factor)

    __radd__ = __add__

    def __mul__(self, weight: object) -> Late:
        if not isinstance(weight, int | float):
            return NotImplemented
        return Late(self.fast, self.offset * weight, self.factor * weight)

    __rmul__ = __mul__
