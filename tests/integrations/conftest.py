"""Models and loops are shared with the tests of the Grower."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "grower"))
