"""What the long run reports is what its samples say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import json, long_run
at = range(0, 400, 20)
leak = lambda k, base, each: {"rss": base + 64 * each * k, "trimmed": base}
samples = [
    {"iteration": k, "processes": {"flat": leak(k, 10**8, 0), "leaks": leak(k, 10**8, 700 if k > 100 else 9000)}} for k in at
]
mine = long_run.census()
kept = [bytearray(40_000_000)]
more = long_run.census()
found = [long_run.growth(samples, 120), long_run.growth(samples, 400)]
print(json.dumps([*found, more["rss"] - mine["rss"], mine["types"]["builtins.dict"]]))
"""


def test_the_slope_after_the_warm_up_is_told_by_process() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found, none, grown, dicts = json.loads(done.stdout)
    assert {name: row["rss_bytes_per_trajectory"] for name, row in found.items()} == {"flat": 0.0, "leaks": 700.0}
    assert found["leaks"]["trimmed_bytes_per_trajectory"] == 0.0
    assert none == {}
    assert 39e6 < grown < 60e6 and dicts > 100
