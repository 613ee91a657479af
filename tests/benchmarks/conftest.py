"""The scripts of ``benchmarks/`` and ``scripts/`` are imported as they are run: from their own folders."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "scripts")]
