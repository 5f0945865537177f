# SPDX-License-Identifier: MIT
"""The study's modules are found as its own programs find them."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
