"""How an engine fills a cache of compiled graphs before a run; ``nxdt compile`` asks for it. No torch here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

__all__ = ["CompileAhead", "CompilesAhead", "GraphOrigins"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphOrigins:
    """How many graphs of a process were compiled, and how many were in the cache."""

    new: int = 0
    """Compiled, and kept in the cache."""
    found: int = 0
    """Loaded from the cache."""
    not_kept: int = 0
    """Compiled, and of a kind that the cache cannot keep."""

    def __add__(self, other: GraphOrigins) -> GraphOrigins:
        return GraphOrigins(
            new=self.new + other.new, found=self.found + other.found, not_kept=self.not_kept + other.not_kept
        )

    def __sub__(self, other: GraphOrigins) -> GraphOrigins:
        return GraphOrigins(
            new=self.new - other.new, found=self.found - other.found, not_kept=self.not_kept - other.not_kept
        )

    def __str__(self) -> str:
        text = f"{self.new} new, {self.found} from the cache"
        return f"{text}, {self.not_kept} that the cache cannot keep" if self.not_kept else text


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileAhead:
    """What an engine says of compiling ahead of one run."""

    cache: str
    """Where compiled graphs are kept, for people."""
    origins: Callable[[], GraphOrigins] | None = None
    """Counts the graphs of the calling process so far; None where the steps of a trial compile nothing themselves."""
    tool: tuple[str, ...] = ()
    """Words in front of the command that runs a trial. The tool collects the graphs of the trial and compiles them when
    it ends; none where the steps compile."""
    result: Callable[[], str] | None = None
    """Says what the tool has added to the cache since this was made."""


@runtime_checkable
class CompilesAhead(Protocol):
    """Optional member of an engine's class: a cache of compiled graphs that a trial fills."""

    @staticmethod
    def compile_ahead(config: Any) -> CompileAhead:
        """Say how a trial of the run fills the cache that the run reads. The trial's own processes ask, too.

        Args:
            config: the whole resolved configuration, checked.

        Raises:
            CompileIsOff: the run compiles nothing.
            NxdtError: the cache cannot be written, or a tool is missing.
        """
        ...
