"""Counts of what ``torch.compile`` makes in this process: graphs, graph breaks and recompilations."""

from __future__ import annotations

from types import TracebackType

from torch._dynamo.callback import CallbackArgs, CallbackTrigger, callback_handler
from torch._dynamo.utils import counters

__all__ = ["GraphCounts"]


class GraphCounts:
    """What ``torch.compile`` makes anywhere in this process while the block runs.

    Example::

        with GraphCounts() as counts:
            train_step(...)
        print(counts.graphs, counts.breaks, counts.recompilations)
    """

    def __init__(self) -> None:
        self.graphs = 0
        """That a backend was given."""
        self.breaks = 0
        """Places where a graph ended because torch could not trace what followed."""
        self.recompilations = 0
        """Compilations of code that had been compiled before: for training and validation, another kind of layer, or
        because something changed."""

    def __enter__(self) -> GraphCounts:
        self._before = self._totals()
        callback_handler.register_start_callback(self._start)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        callback_handler.remove_start_callback(self._start)
        graphs, breaks = self._totals()
        self.graphs, self.breaks = graphs - self._before[0], breaks - self._before[1]

    @staticmethod
    def _totals() -> tuple[int, int]:
        return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())

    def _start(self, arguments: CallbackArgs) -> None:
        of_dynamo = arguments.callback_trigger is CallbackTrigger.DYNAMO
        self.recompilations += of_dynamo and not str(arguments.compile_id).endswith("/0")
