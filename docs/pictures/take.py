"""Takes the pictures of README.md from a run of the quick start: `make pictures`, some minutes, with Chromium.

`learning_curve.svg` is the reward of training and held-out questions, `page_light.png` and `page_dark.png` the live page when most
iterations have ended.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt

PICTURES = Path(__file__).parent
ROOT = PICTURES.parents[1]
SETTINGS = ("run.name=quickstart", "evaluation.every=4", "cluster.dashboard_port=0")
LATE_ITERATION = 20
WIDTH, HEIGHT = 1280, 780


def browser() -> Any:
    """The Chromium that the tests of the page drive."""
    spec = importlib.util.spec_from_file_location("driven_chromium", ROOT / "tests/observe/conftest.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


async def photograph(address: str) -> None:
    """The page in both colour schemes, once it has drawn a run."""
    driver = browser()
    executable = next(filter(None, map(shutil.which, driver.CHROMIUM_NAMES)), None)
    if executable is None:
        raise SystemExit("take.py: no Chromium on PATH; type apt-get install chromium")
    with tempfile.TemporaryDirectory() as profile:
        async with driver.open_page(executable, Path(profile), address) as page:
            await page.call("Emulation.setScrollbarsHidden", hidden=True)
            size = {"width": WIDTH, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": False}
            await page.call("Emulation.setDeviceMetricsOverride", **size)
            for scheme in ("light", "dark"):
                await page.scheme(scheme)
                await page.call("Page.reload")
                await page.until("globalThis.Bokeh && Bokeh.documents.length && deepQuery('canvas').length > 3")
                await page.until(
                    "new Promise(resolve => setTimeout(() => resolve(true), 3000))"
                )  # it follows by half a second
                (PICTURES / f"page_{scheme}.png").write_bytes(await page.screenshot())


def draw(run: Path) -> None:
    """The learning curve of a run."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    trained = [(line["iteration"], line["reward"]) for line in lines if "reward" in line]
    held_out = [(line["step"], line["evaluation/reward"]) for line in lines if "evaluation/reward" in line]
    mpl.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "libra", "font.family": "sans-serif", "font.size": 11}
    figure, axes = plt.subplots(figsize=(7, 3))
    axes.plot(*zip(*trained, strict=True), color="#8fb4d9", label="training questions")
    axes.plot(*zip(*held_out, strict=True), "o-", color="#1f5a96", label="256 held-out questions")
    axes.set(xlabel="weight version", ylabel="mean reward", ylim=(0, 1.02), xlim=(0, None))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, loc="lower right")
    figure.tight_layout()
    figure.savefig(PICTURES / "learning_curve.svg", metadata={"Date": None})


def main() -> None:
    """Run the quick start in a temporary directory, and take both pictures."""
    with tempfile.TemporaryDirectory() as place:
        words = [sys.executable, "-u", "-m", "libra", "run", "libra/quickstart", f"run.dir={place}/runs", *SETTINGS]
        address = None
        with subprocess.Popen(words, cwd=place, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                sys.stdout.write(line)
                if found := re.search(r"watch them at (\S+)", line):
                    address = found[1]
                if address and (found := re.match(r"iteration (\d+) \(", line)) and int(found[1]) >= LATE_ITERATION:
                    asyncio.run(photograph(address))
                    address = None
        if process.returncode:
            raise SystemExit(process.returncode)
        draw(Path(place) / "runs/quickstart")


if __name__ == "__main__":
    main()
