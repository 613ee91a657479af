"""The process of one stage: ``python -m accelerator.child MODULE:FUNCTION OPTIONS --rows FILE --work FOLDER``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from accelerator.bench import Bench


def main(arguments: Sequence[str] | None = None) -> int:
    """Call the function; status 1 where a part of it failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work_of")
    parser.add_argument("options", type=json.loads)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--compile", action="store_true", help="compile in small runs too")
    asked = parser.parse_args(arguments)
    module, _, function = asked.work_of.partition(":")
    bench = Bench(rows=asked.rows, work=asked.work, small=asked.small, compiles=asked.compile or not asked.small)
    getattr(import_module(module), function)(bench, **asked.options)
    return int(bench.failed)


if __name__ == "__main__":
    sys.exit(main())
