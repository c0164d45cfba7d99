"""Equal contexts that are computed once: one trajectory leads, those with the same context wait until its KV is computed.

Invariants
1. A trajectory leads, follows, or does neither; there is one leader per context.
2. A follower runs, and has nothing cached.
"""

from __future__ import annotations


class SharedContexts:
    """The trajectory that computes each context (leader), and those that wait for its KV (followers). Contexts are keyed by
    their bytes."""

    def __init__(self) -> None:
        self.following: dict[str, str] = {}  # follower -> leader
        self._leader_of: dict[bytes, str] = {}
        self._context_of: dict[str, bytes] = {}  # the inverse

    @property
    def leaders(self) -> set[str]:
        """The trajectories that lead."""
        return set(self._context_of)

    def begin(self, name: str, context: bytes, goes_on: bool) -> None:
        """A trajectory starts a turn with this context. Where it goes on, it leads only what the context begins with."""
        if not goes_on:
            self.join(name, context)
        elif not context.startswith(self._context_of.get(name, b"")):
            self.leave(name)

    def join(self, name: str, context: bytes) -> None:
        """Lead the trajectories with this context, or follow the one that leads them."""
        self.leave(name)
        leader = self._leader_of.setdefault(context, name)
        if leader == name:
            self._context_of[name] = context
        else:
            self.following[name] = leader

    def leave(self, name: str) -> None:
        """Stop leading and following."""
        self.following.pop(name, None)
        context = self._context_of.pop(name, None)
        if context is not None:
            del self._leader_of[context]
