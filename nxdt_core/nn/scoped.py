"""Values that hold within a block, for code that ``torch.compile`` traces.

``ContextVar.get`` breaks its graphs. An attribute does not: what is read here becomes an input of the graph (a tensor)
or a guard (anything else, which should therefore not change from step to step).
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Generic, TypeVar, final

__all__ = ["Scoped"]

T = TypeVar("T")


@final
class Scoped(Generic[T]):
    """A value of the process, not of a thread: autograd recomputes in its own threads.

    Example::

        _SCALE = Scoped(1.0)

        with _SCALE.set(0.5):
            assert _SCALE.value == 0.5
    """

    def __init__(self, default: T) -> None:
        self.value = default

    def set(self, value: T) -> AbstractContextManager[None]:
        """Set :attr:`value` within a block. The returned context may be entered again: a backward that is split
        recomputes twice."""
        return _Block(self, value)


class _Block(AbstractContextManager[None], Generic[T]):
    def __init__(self, scoped: Scoped[T], value: T) -> None:
        self._scoped, self._value = scoped, value
        self._before: list[T] = []

    def __enter__(self) -> None:
        self._before.append(self._scoped.value)
        self._scoped.value = self._value

    def __exit__(self, *_: object) -> None:
        self._scoped.value = self._before.pop()
