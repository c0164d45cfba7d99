"""How many engines each live weight version has: DORA's rule of rounding, arXiv:2604.26256. Pure."""

from __future__ import annotations

from collections.abc import Mapping


def version_shares(engines: int, under_way: Mapping[int, int]) -> dict[int, int]:
    """Engines of each version: ``round(engines x R_w / sum of R)``, with ``R_w`` trajectories of version ``w`` under way.

    Those of the newest version count together with the ones that are to begin with it. Differs from the paper, which does not say
    what happens then: a version with trajectories has at least one engine, and the newest version what the others leave. Where
    there are not enough engines, the versions with the fewest trajectories per engine give one up.

    Parameters
    ----------
    engines : int
        All, at least as many as versions.
    under_way : mapping of version to trajectories
        Those without a trajectory get no engine.
    """
    live = {version: count for version, count in sorted(under_way.items()) if count > 0}
    if not live:
        return {}
    total, newest = sum(live.values()), max(live)
    shares = {version: max(1, round(engines * count / total)) for version, count in live.items()}
    shares[newest] = max(1, engines - sum(share for version, share in shares.items() if version != newest))
    while sum(shares.values()) > engines and any(share > 1 for share in shares.values()):
        least = min((v for v in shares if shares[v] > 1), key=lambda v: (live[v] / shares[v], v))
        shares[least] -= 1
    return shares
