"""Makes the writers of the generated pages importable."""

import sys
from pathlib import Path

sys.path += [str(Path(__file__).parents[1] / name) for name in ("config", "architecture")]
