"""The invariants of a run counted without Libra, with plain zarr, numpy and scipy: ``plain_zarr_invariants.py RUN``.

Prints a JSON object a line, ``name``, ``broken`` and ``of``, in the order of ``libra inspect RUN --invariants``, which must have
the same numbers; the last line has distance and probability of the Kolmogorov-Smirnov test. The run's settings are those of its
``config.resolved.yaml``.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import yaml
import zarr
from scipy.stats import ks_2samp


def main(run: Path) -> None:
    config: dict[str, Any] = yaml.safe_load((run / "config.resolved.yaml").read_text())
    eta, staleness, trainer = config["run"]["eta"], config.get("staleness") or {}, config["trainer"]
    over_age, window = staleness.get("over_age", "wait"), staleness.get("window")
    store = zarr.open_group(run / "trajectories.zarr", mode="r")
    committed: Any = store.attrs["committed"]

    def column(name: str) -> Any:
        whole: Any = store[f"trajectory/{name}"]
        return whole[: committed["trajectories"]]

    action, version = (np.asarray(store[name][: committed["tokens"]]) for name in ("is_action", "weight_version"))
    lots = ("iteration", "group", "sample", "batch", "offset", "length", "advantage")
    train = np.flatnonzero(column("split") == "train")
    rows = {name: column(name)[train] for name in lots}
    failure = column("failure")[train]
    sound = ((failure == "none") | (failure == "policy")) & (rows["batch"] >= 0)
    made = [version[o : o + n][action[o : o + n]] for o, n in zip(rows["offset"], rows["length"], strict=True)]
    generated = np.array([len(each) for each in made])
    fresh = np.array([int((batch - each <= eta).sum()) for batch, each in zip(rows["batch"], made, strict=True)])
    lag = np.array(
        [max(0, b - min(each, default=b)) if b >= 0 else 0 for b, each in zip(rows["batch"], made, strict=True)]
    )
    spread = np.array([int(max(each, default=0)) - int(min(each, default=0)) for each in made])
    place = [*zip(rows["iteration"].tolist(), rows["group"].tolist(), strict=True)]
    late_groups = {p for p, is_sound, behind in zip(place, sound, lag, strict=True) if is_sound and behind > eta}
    late = np.array([p in late_groups for p in place], bool)
    trained = np.where(sound, generated, 0)
    if over_age == "drop":
        trained = np.where(late & (rows["advantage"] == 0), 0, trained)
    if over_age == "mask":
        trained = np.where(late & sound, fresh, trained)

    def show(name: str, broken: int, of: int, **more: float) -> None:
        print(json.dumps({"name": name, "broken": int(broken), "of": int(of), **more}))  # noqa: T201

    show("lag <= eta", np.maximum(trained - fresh, 0).sum(), trained.sum())
    ids = [*zip(place, rows["sample"].tolist(), strict=True)]
    times = Counter(ids)
    show("consumed once", sum(count > 1 for count in times.values()), len(times))
    batches_of: dict[tuple[int, int], list[int]] = {}
    for p, batch in zip(place, rows["batch"].tolist(), strict=True):
        batches_of.setdefault(p, []).append(batch)
    torn = sum(len(taken) != trainer["group_size"] or len(set(taken)) > 1 for taken in batches_of.values())
    show("whole groups", torn, len(batches_of))
    show("C1, one version each", (spread > 0).sum(), len(made))
    batches = int(rows["batch"].max(initial=-1)) + 1
    missing = batches * trainer["prompts"] - len(batches_of) if batches >= config["run"]["iterations"] else 0
    dropped = len(late_groups) if over_age == "drop" else 0
    show("C2, no started prompt is dropped", missing + dropped, batches * trainer["prompts"])
    show("C3, trajectories within the bound", (lag > eta).sum(), len(made))
    if window is not None:
        show(f"window of {window} versions", (spread >= window).sum(), len(made))
    consumed, all_made = trained[trained > 0], generated[generated > 0]
    if not len(consumed):
        show("lengths", 0, len(all_made))
        return
    test = ks_2samp(consumed, all_made, method="asymp")
    show("lengths as generated", test.pvalue < 0.01, 1, distance=float(test.statistic), p=float(test.pvalue))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
