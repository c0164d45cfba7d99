"""`mkdocs build --strict` makes the site without a warning (links included), and it has the public names."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import libra

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.live


def test_the_site_is_built_without_a_warning_and_documents_each_public_name(tmp_path):
    pytest.importorskip("mkdocs", reason="no mkdocs; type: make setup-docs")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    text = "".join(path.read_text() for path in (tmp_path / "api").glob("*.html"))
    names = set(libra.__all__) - {"__version__"}
    missing = {name for name in names if not re.search(rf'id="libra\.(\w+\.)*{name}"', text)}
    assert not missing, f"docs/api has no {sorted(missing)}"
