"""Files and links that the pages name are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGES = ["README.md", *sorted(f"docs/{path.name}" for path in (Path(__file__).parents[2] / "docs").glob("*.md"))]

SHIPPED = {"libra/quickstart", "libra/tiny-arithmetic"}
"""Names of a configuration and a model, which look like files."""


def _anchor(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES)
def test_files_named_on_a_page_exist(repository: Path, page: str) -> None:
    text = (repository / page).read_text()
    named = set(re.findall(r"`((?:libra|tests|benchmarks|workflows|configs|docker|docs)/[\w./-]*[\w/])`?[:` ]", text))
    missing = sorted(name for name in named - SHIPPED if not (repository / name).exists())
    assert not missing, f"{page} names files that are not there: {missing}"


@pytest.mark.parametrize("page", PAGES)
def test_links_between_pages_lead_somewhere(repository: Path, page: str) -> None:
    path = repository / page
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        headings = re.findall(r"^#+ (.*)$", target.read_text(), re.M) if target.is_file() and anchor else []
        if not target.exists() or (anchor and anchor not in map(_anchor, headings)):
            broken.append(link)
    assert not broken, f"{page} has broken links: {broken}"
