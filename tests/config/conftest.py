"""Makes `doc_pages` importable for the tests of the pages."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
