"""The base of all errors: data, two templates, one way to print."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, dataclass_transform

from nxdt_core.visible_text import visible

__all__ = ["NxdtError", "either", "listing", "one_of"]


@dataclass_transform(kw_only_default=True)
class NxdtError(Exception):
    """Base of all user-facing errors; annotated names of a subclass are its keyword-only data.

    (A hand-written initialiser instead of ``@dataclass``: that decorator compiles code for each class, 0.3 ms
    apiece, which every start of the command line would pay for sixty classes.)
    """

    code: ClassVar[str] = "NXDT-000"
    exit_status: ClassVar[int] = 2
    happened: ClassVar[str]
    """Template of what was found, over the names of ``_view``."""
    remedy: ClassVar[str]
    """Template of what to do."""
    usual_remedy: ClassVar[str] = ""
    """What to do in general, where ``remedy`` depends on what was found: for the page of error codes and
    ``nxdt explain``."""

    def __init__(self, **data: Any) -> None:
        names = self._fields()
        missing = [n for n in names if n not in data and not hasattr(type(self), n)]
        unknown = [n for n in data if n not in names]
        if missing or unknown:
            raise TypeError(f"{type(self).__name__}: missing {missing}, unknown {unknown}")
        for name in names:
            setattr(self, name, data.get(name, getattr(type(self), name, None)))
        super().__init__()

    @classmethod
    def _fields(cls) -> list[str]:
        """Names of the data that instances carry, those of base classes first."""
        return [
            name
            for klass in reversed(cls.__mro__)
            for name, annotation in vars(klass).get("__annotations__", {}).items()
            if not str(annotation).startswith("ClassVar")
        ]

    def __reduce__(self) -> Any:
        return _rebuild, (type(self), NxdtError._view(self))

    def what(self) -> str:
        """Return one sentence: what was found."""
        return self.happened.format(**self._view())

    def do(self) -> str:
        """Return one sentence: what the user can do about it."""
        return self.remedy.format(**self._view())

    def _view(self) -> dict[str, Any]:
        """Values that the two templates may name; subclasses add what they compute."""
        return {name: getattr(self, name) for name in self._fields()}

    def __str__(self) -> str:
        return visible(f"[{self.code}] {self.what()}\n  {self.do()}")


def _rebuild(cls: type[NxdtError], data: dict[str, Any]) -> NxdtError:
    return cls(**data)


def either(words: Sequence[str]) -> str:
    """Join alternatives for a sentence: ``a, b or c``."""
    return "".join(words) if len(words) < 2 else f"{', '.join(words[:-1])} or {words[-1]}"


def one_of(names: Sequence[str], limit: int = 8) -> str:
    """Join names that a user can choose from, for a sentence: ``'a', 'b' or 3 more``."""
    more = len(names) - limit
    return either([*map(repr, names[:limit]), *([f"{more} more"] if more > 0 else [])])


def listing(names: tuple[str, ...] | list[str], limit: int = 8) -> str:
    """Join names for a sentence: ``'a', 'b' and 3 more``."""
    shown = ", ".join(repr(n) for n in names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
