"""Files and links that the pages name are there. Nothing is built, and no link to another host is followed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", "CHANGELOG.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]

SHIPPED = {"libra/quickstart", "libra/tiny-arithmetic"}
"""Names of a configuration and a model, which look like files."""

CODE = re.compile(r"^```.*?^```$", re.M | re.S)
IN_LINE_CODE = re.compile(r"`[^`\n]*`")
LINK = re.compile(r'\]\(([^)\s]+)\)|^\[[^\]]+\]: (\S+)|\b(?:href|src|srcset)="([^"]+)"', re.M)


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives the headings of a page; a repeated heading gets a number."""
    found: list[str] = []
    for heading in re.findall(r"^#+ (.*)$", CODE.sub("", text), re.M):
        anchor = re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
        repeated = found.count(anchor)
        found += [anchor, f"{anchor}-{repeated}"] if repeated else [anchor]
    return set(found)


def broken_links(path: Path) -> list[str]:
    """Relative links of a page, pictures included, that lead to no file, or to no heading of one."""
    broken = []
    text = IN_LINE_CODE.sub("", CODE.sub("", path.read_text()))
    for link in ("".join(each) for each in LINK.findall(text)):
        if "://" in link or link.startswith("mailto:"):
            continue
        name, _, anchor = link.partition("#")
        target = path.parent / name if name else path
        there = target.is_file() and (not anchor or target.suffix != ".md" or anchor in anchors(target.read_text()))
        if not there:
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", [page for page in PAGES if page != "CHANGELOG.md"])
def test_files_named_on_a_page_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    named = set(re.findall(r"`((?:libra|tests|benchmarks|workflows|configs|docker|docs)/[\w./-]*[\w/])`?[:` ]", text))
    missing = sorted(name for name in named - SHIPPED if not (ROOT / name).exists())
    assert not missing, f"{page} names files that are not there: {missing}"


@pytest.mark.parametrize("page", PAGES)
def test_links_between_pages_lead_somewhere(page: str) -> None:
    broken = broken_links(ROOT / page)
    assert not broken, f"{page} has broken links: {broken}"


def test_broken_links_are_found(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# A b: `c`\n\n# Twice\n\n# Twice\n\n```\n# No heading\n```\n")
    (tmp_path / "page.md").write_text(
        "[right](other.md#a-b-c) [second](other.md#twice-1) [outside](https://example.org) `[code](gone.md)`\n"
        '[a](gone.md) [b](other.md#gone) [c](#gone) [d](other.md#no-heading) <img src="gone.png"> [folder](.)\n\n'
        "[e]: gone.txt\n\n```\n[in a fence](gone.md)\n```\n"
    )
    wanted = ["gone.md", "other.md#gone", "#gone", "other.md#no-heading", "gone.png", ".", "gone.txt"]
    assert broken_links(tmp_path / "page.md") == wanted
