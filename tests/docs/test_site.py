"""`mkdocs build` makes the site without a warning, every link in it leads somewhere, and it has the public names."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

import libra

ROOT = Path(__file__).parents[2]


class Page(HTMLParser):
    """The links of a page, and the places in it that a link can lead to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.links += [value for name in ("href", "src") if (value := values.get(name)) is not None]
        self.anchors |= {value for name in ("id", "name") if (value := values.get(name)) is not None}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs", reason="no mkdocs: make setup-docs")
    directory = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(directory)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return directory


def test_every_link_of_the_site_leads_somewhere(site: Path) -> None:
    pages = {path: Page(path.read_text()) for path in site.rglob("*.html") if path.name != "404.html"}
    broken = []
    for path, page in pages.items():
        for link in page.links:
            if re.match(r"[a-z]+:", link):
                continue
            name, _, anchor = unquote(link).partition("#")
            target = (path.parent / name).resolve() if name else path
            if not target.is_file() or (anchor and target in pages and anchor not in pages[target].anchors):
                broken.append(f"{path.relative_to(site)}: {link}")
    assert len(pages) > 30 and not broken, broken


def test_a_page_documents_each_public_name(site: Path) -> None:
    text = "".join(path.read_text() for path in (site / "api").glob("*.html"))
    names = set(libra.__all__) - {"__version__"}
    missing = {name for name in names if not re.search(rf'id="libra\.(\w+\.)*{name}"', text)}
    assert not missing, f"docs/api has no {sorted(missing)}"
