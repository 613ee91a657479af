"""Measures what matters on an accelerator that is available for a short time, the most valuable stages first.

Each stage runs in a separate process with its own time limit. A stage that fails is recorded with the end of its
log, and the next one starts. ``results.json``, ``results.md``, the logs and the compile caches are in the folder
``--out``; results are written after each stage. A later call with the same folder runs the missing stages, so
that the day can consist of several calls:

    python benchmarks/accelerator_day.py --out day --minutes 9 --all

The limits of the default stages add up to 12 minutes, those of all (``--all``) to 24. ``--small`` tries every
stage on a CPU. Where nxdt is not installed and nothing can be downloaded, ``--bundle`` names the folder that ``make
accelerator-bundle`` made. The state ``ok`` of a stage says nothing about speed: figures are recorded, not judged.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from accelerator.bundle import install
from accelerator.driver import Day, end_on_sigterm
from accelerator.results import Results, table
from accelerator.stages import STAGES, chosen


def main() -> int:
    """Run stages and print their tables; status 1 where one did not end well."""
    begun = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("accelerator_day"), help="folder of results, logs and caches")
    parser.add_argument("--stages", default="", help="names of stages or groups, separated by commas")
    parser.add_argument("--all", action="store_true", help="all stages, not the default ones")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no stage that could take longer")
    parser.add_argument("--bundle", type=Path, help="folder of wheels to install what is missing from")
    parser.add_argument(
        "--note", default="", help="what is special, such as a patch: a text or a file; for the results"
    )
    parser.add_argument("--retry", action="store_true", help="run stages again that did not end well")
    parser.add_argument("--small", action="store_true", help="tiny shapes, which run on a CPU")
    parser.add_argument("--compile", action="store_true", help="with --small: compile models too")
    parser.add_argument("--list", action="store_true", help="print the stages and their limits")
    asked = parser.parse_args()
    if asked.list:
        for stage in STAGES:
            print(f"{stage.name:12} {stage.minutes:4g} min  {'default' if stage.default else ''}")
        return 0
    try:
        stages = chosen([name for name in asked.stages.split(",") if name], everything=asked.all)
    except KeyError as error:
        parser.error(str(error.args[0]))
    end_on_sigterm()
    out = asked.out.resolve()
    site = out / "site"
    failed = install(asked.bundle, site) if asked.bundle else {}
    note = Path(asked.note).read_text(encoding="utf-8") if asked.note and Path(asked.note).is_file() else asked.note
    _record_call(out, note, failed)
    day = Day(
        out=out,
        deadline=begun + 60 * asked.minutes,
        small=asked.small,
        compiles=asked.compile,
        retry=asked.retry,
        path=[str(site)] if asked.bundle else (),
    )
    machine = [stage for stage in STAGES if stage.name == "machine"]
    results = day.run([*machine, *(stage for stage in stages if stage not in machine)])
    print(f"\n{table(results.records)}\nresults: {out}")
    return int(any(record["outcome"] != "ok" for record in results.records.values()))


def _record_call(out: Path, note: str, failed: dict[str, str]) -> None:
    """Add this call to the record ``calls``, with the wheels that could not be installed."""
    results = Results(out)
    rows = results.records.get("calls", {}).get("rows", [])
    rows.append({"what": datetime.now(UTC).isoformat(timespec="seconds"), "arguments": " ".join(sys.argv[1:])})
    rows += [{"what": "note", "outcome": line} for line in note.splitlines()]
    rows += [{"what": wheel, "outcome": f"not installed: {error}"} for wheel, error in failed.items()]
    results.put("calls", {"outcome": "failed" if failed else "ok", "rows": rows})


if __name__ == "__main__":
    sys.exit(main())
