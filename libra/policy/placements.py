"""Where the dispatcher places a trajectory, and what that costs; the log has it as `libra.facts.QuantumDispatched`."""

from __future__ import annotations

import msgspec

from libra.types import Phase


class LeaseTaken(msgspec.Struct, frozen=True, gc=False):
    """What the lease of a placed action holds, and when it was granted."""

    at_s: float
    cores: int
    memory_bytes: int
    gpus: int


class Move(msgspec.Struct, frozen=True, gc=False):
    """The price of a change of home; see `libra.policy.move_price`.

    Attributes
    ----------
    home : str
        The worker whose engine has the KV.
    tokens : int
        Context tokens.
    prefill_s : float
        Expected seconds of computing their KV again; 0: not known.
    transfer_s : float or None
        Expected seconds of sending it; None: the two engines do not exchange KV.
    sends : bool
        Whether the KV is sent.
    """

    home: str
    tokens: int
    prefill_s: float
    transfer_s: float | None
    sends: bool

    @property
    def seconds(self) -> float:
        """What the move costs: the lesser of the two, 0 if it is not known."""
        return self.transfer_s if self.sends and self.transfer_s is not None else self.prefill_s


class Place(msgspec.Struct, frozen=True, gc=False):
    """Give a parked trajectory a slot of ``phase`` on ``worker``; ``move``: its price, if this changes its home and the two
    engines exchange KV; ``lease``: what its action holds, once tools have declared resources."""

    key: str
    phase: Phase
    worker: str
    reason: str
    move: Move | None = None
    lease: LeaseTaken | None = None
