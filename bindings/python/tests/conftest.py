# SPDX-License-Identifier: MIT
"""The oracle of tests/ is the truth here too: written from the definitions alone, sharing no line with the library."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tests"))
