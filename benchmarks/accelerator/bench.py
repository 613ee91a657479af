"""What every stage is given: where its rows go, and what becomes of a part that fails. No torch at import."""

from __future__ import annotations

import gc
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["GIB", "Bench"]

GIB = 2**30


@dataclass(kw_only=True)
class Bench:
    """A stage's surroundings."""

    rows: Path
    """JSON Lines; a row is on the disk once it is measured."""
    work: Path
    """Scratch folder, removed after the stage."""
    small: bool = False
    """Tiny shapes that run on a CPU in seconds."""
    compiles: bool = True
    """Whether models are compiled."""
    imports_s: float = 0.0
    """Seconds that the process's imports took, before its turn."""
    failed: bool = field(default=False, init=False)
    """Whether a part failed; running out of memory is a result."""

    def row(self, what: str, **figures: Any) -> None:
        """Record figures; None where a device has none."""
        with self.rows.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"what": what, **figures}) + "\n")
        print(f"{what}: {figures}", flush=True)

    @contextmanager
    def part(self, what: str) -> Iterator[None]:
        """Record what the block raises as the row of ``what`` and continue after it."""
        try:
            yield
        except Exception as error:
            traceback.print_exc(file=sys.stdout)
            if _out_of_memory(error):
                self.row(what, outcome="out of memory")
            else:
                self.failed = True
                first_line = str(error).strip().partition("\n")[0]
                self.row(what, outcome=f"{type(error).__name__}: {first_line}"[:200])
        finally:
            self._free()

    @property
    def device(self) -> torch.device:
        """The accelerator; the CPU where there is none."""
        from nxdt_core.distributed.devices import current_device

        return current_device()

    def wait(self) -> None:
        """Wait for the device."""
        import torch

        from nxdt_core.distributed.devices import profile_of

        if not profile_of(self.device).host:
            torch.accelerator.synchronize()

    def seconds(self, step: Callable[[], object], repeats: int, *, warm_up: int = 2) -> float:
        """Return the seconds of one call of ``step``, the mean of ``repeats`` calls without a wait between them."""
        for _ in range(warm_up):
            step()
        self.wait()
        begun = time.perf_counter()
        for _ in range(repeats):
            step()
        self.wait()
        return (time.perf_counter() - begun) / repeats

    def _free(self) -> None:
        """Let the next part have the memory of this one."""
        torch = sys.modules.get("torch")
        if torch is not None:
            gc.collect()
            with suppress(Exception):  # a device that an error left unusable
                torch.get_device_module(self.device).empty_cache()


def _out_of_memory(error: BaseException | None) -> bool:
    """Whether an allocator's failure is the error or what it came from."""
    while error is not None:
        if type(error).__name__ in ("OutOfMemoryError", "OutOfMemory", "MemoryError"):
            return True
        error = error.__cause__ or error.__context__
    return False
