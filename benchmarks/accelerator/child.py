"""The process of one stage: ``python -m accelerator.child MODULE:FUNCTION OPTIONS --rows FILE --work FOLDER``.

It makes the imports that take longest and then waits for a byte on the standard input. Meanwhile another stage
measures, so it must not use the device before.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from accelerator.bench import Bench


def main(arguments: Sequence[str] | None = None) -> int:
    """Call the function; status 1 where a part of it failed."""
    begun = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work_of")
    parser.add_argument("options", type=json.loads)
    parser.add_argument("--imports", default="", help="modules, separated by commas")
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--compile", action="store_true", help="compile in small runs too")
    asked = parser.parse_args(arguments)
    module_name, _, function = asked.work_of.partition(":")
    module = import_module(module_name)
    for name in asked.imports.split(","):
        with suppress(ImportError, ValueError):  # the part that needs it says so; there may be none
            import_module(name)
    torch = sys.modules.get("torch")
    used = torch is not None and torch.cuda.is_initialized()
    imports_s = time.monotonic() - begun
    if not sys.stdin.buffer.read(1):
        return 1  # the driver has ended
    bench = Bench(
        rows=asked.rows,
        work=asked.work,
        small=asked.small,
        compiles=asked.compile or not asked.small,
        imports_s=imports_s,
    )
    if used:
        bench.row("imports", outcome="used the device while the stage before was measured")
    getattr(module, function)(bench, **asked.options)
    return int(bench.failed)


if __name__ == "__main__":
    sys.exit(main())
