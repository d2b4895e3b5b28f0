from __future__ import annotations

import sys
from pathlib import Path

# `benchmarks` is a package of the checkout that nothing installs.
sys.path.insert(0, str(Path(__file__).parents[2]))
