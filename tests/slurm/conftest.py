"""Makes ``single_node`` importable: with importlib as import mode pytest adds no folder of tests to the path."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
