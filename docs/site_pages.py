"""Pages of the site that lie outside this folder: README.md is its first page, CHANGELOG.md the page of changes."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = {"index.md": "README.md", "changes.md": "CHANGELOG.md"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds them, with links as they are seen from this folder. A hook of mkdocs."""
    for page, source in PAGES.items():
        text = re.sub(r'(\]\(|(?:src|srcset|href)=")docs/', r"\1", (ROOT / source).read_text())
        for name, other in PAGES.items():
            text = text.replace(f"]({other}", f"]({name}")
        files.append(File.generated(config, page, content=text))
    return files
