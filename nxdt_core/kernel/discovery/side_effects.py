"""What importing an entry module changed in the process beyond itself. Imports nothing that is not there already."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

__all__ = ["HEAVY", "Watch", "note_on_threads"]

HEAVY = ("torch", "numpy", "transformers", "pytorch_lightning", "lightning", "jax", "tensorflow", "datasets", "pandas")
"""Libraries that an entry module must leave alone; strict mode holds plugins to it."""
_PATCHED = (
    "torch",
    "torch.nn",
    "torch.nn.functional",
    "torch.nn.init",
    "torch.optim",
    "torch.distributed",
    "torch.utils.checkpoint",
)
"""Modules whose functions and classes a plugin must not replace."""
_CLASSES = (("torch", "Tensor"), ("torch.nn", "Module"), ("torch.nn", "Linear"), ("torch.optim", "Optimizer"))
_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
_found: dict[str, str] = {}
"""Note by module: it is imported once in a process, kernels may be started more often."""


class Watch:
    """Compares the process before and after the import of one plugin.

    Example::

        watch = Watch("acme_nxdt")
        importlib.import_module("acme_nxdt")
        note = watch.note()
    """

    def __init__(self, module: str, started: Sequence[str] = ()) -> None:
        """
        Args:
            module: that is about to be imported.
            started: Names of the threads that it starts, as they are started.
        """
        self._module = module.partition(":")[0]
        self._started = started
        self._imported = self._module in sys.modules
        self._before: Mapping[str, Any] = {} if self._imported else _state()

    def note(self) -> str:
        """Return what the import did, in one line; empty where it did nothing but import light modules."""
        if not self._imported:
            _found[self._module] = "; ".join(self._changes())
        return _found.get(self._module, "")

    def heavy(self) -> list[str]:
        """Return the libraries of :data:`HEAVY` that the import brought in."""
        return [name for name in HEAVY if name in sys.modules and name not in self._before.get("heavy", HEAVY)]

    def _changes(self) -> Iterator[str]:
        before, after, heavy = self._before, _state(), self.heavy()
        if heavy:
            yield f"its entry module imports {', '.join(heavy)}, which makes every command slow"
        replaced = sorted(
            set(_replaced(before["torch"], after["torch"])) | set(_defined_by(after["torch"], self._module))
        )
        if replaced:
            yield f"it replaces {_listed(replaced)}, also for the other plugins and the core"
        if self._started:
            yield note_on_threads(self._started)
        if after["path"] != before["path"]:
            yield "it changes sys.path"
        signals = [name for name in _SIGNALS if after["signals"].get(name) is not before["signals"].get(name)]
        if signals and before["signals"]:
            yield f"it handles {_listed(signals)}"
        if heavy:
            return  # what follows, libraries do as well
        variables = {*before["environment"].items()} ^ {*after["environment"].items()}
        if variables:
            yield f"it changes the environment: {_listed(sorted({name for name, _ in variables}))}"
        if after["warnings"] != before["warnings"]:
            yield "it changes the filters of warnings"
        if before["logging"] is not None and after["logging"] != before["logging"]:
            yield "it changes the root logger"


def _state() -> dict[str, Any]:
    """The parts of the process that are compared, as far as their modules are loaded."""
    return {
        "heavy": [name for name in HEAVY if name in sys.modules],
        "torch": dict(_callables()),
        "path": list(sys.path),
        "signals": _signals(),
        "environment": dict(os.environ),
        "warnings": list(sys.modules["warnings"].filters) if "warnings" in sys.modules else [],
        "logging": _root_logger(),
    }


def _callables() -> Iterator[tuple[str, Any]]:
    """Functions and classes of torch by path; nothing where torch is not loaded."""
    for name in _PATCHED:
        module = sys.modules.get(name)
        for attribute, value in list(vars(module).items()) if module is not None else ():
            if callable(value):
                yield f"{name}.{attribute}", value
    for name, kind in _CLASSES:
        owner = getattr(sys.modules.get(name), kind, None)
        for attribute, value in list(vars(owner).items()) if isinstance(owner, type) else ():
            if callable(value):
                yield f"{name}.{kind}.{attribute}", value


def _replaced(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    return (path for path, value in before.items() if after.get(path) is not value)


def _defined_by(found: Mapping[str, Any], module: str) -> Iterator[str]:
    """What of torch is the plugin's own: torch may not have been loaded before, so that nothing can be compared."""
    package = module.partition(".")[0]
    for path, value in found.items():
        if str(getattr(value, "__module__", "")).partition(".")[0] == package:
            yield path


def _signals() -> dict[str, Any]:
    if "signal" not in sys.modules:
        return {}
    module = sys.modules["signal"]
    return {name: module.getsignal(getattr(module, name)) for name in _SIGNALS if hasattr(module, name)}


def _root_logger() -> tuple[int, list[int]] | None:
    if "logging" not in sys.modules:
        return None
    root = sys.modules["logging"].getLogger()
    return root.level, [id(handler) for handler in root.handlers]


def note_on_threads(names: Sequence[str]) -> str:
    """Say which threads were started and made daemons."""
    return f"it starts threads ({_listed(list(names))}), which nxdt makes daemons so that commands end"


def _listed(names: list[str], limit: int = 4) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
