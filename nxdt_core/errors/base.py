"""The base of all errors: data, two templates, one way to print."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar, dataclass_transform

from nxdt_core.system.visible_text import visible

__all__ = ["ErrorCode", "NxdtError", "either", "listing", "one_of", "unusable"]

E = TypeVar("E", bound="NxdtError")


@dataclass_transform(kw_only_default=True)
class NxdtError(Exception):
    """Base of all user-facing errors. Code catches its subclasses; every other code is an :class:`ErrorCode`.

    Annotated names of a subclass are its keyword-only data. (A hand-written initialiser instead of ``@dataclass``: that
    decorator compiles code for each class, 0.3 ms apiece, which every start of the command line would pay.)
    """

    code: str = "NXDT-000"
    exit_status: int = 2
    happened: str
    """Template of what was found, over the names of ``_view``."""
    remedy: str
    """Template of what to do."""
    usual_remedy: str = ""
    """General advice, where ``remedy`` depends on what was found: for the page of error codes and ``nxdt explain``."""
    example: ClassVar[Mapping[str, Any]] = {}
    """Values of a case that users meet, for the same."""
    _names: tuple[str, ...] | None = None
    """Attributes that are values of the templates, for an error that :meth:`define` made."""
    _also: Callable[[Any], Mapping[str, Any]] | None = None

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
    def define(cls: type[E], code: str, cause: str, happened: str, remedy: str, **further: Any) -> ErrorCode[E]:
        """Return the row of an error code of this family.

        Args:
            code: as users see it, such as ``NXDT-S001``.
            cause: one sentence, for ``nxdt explain`` and the page of error codes.
            happened: template of what was found. Its names are the keywords of a call. A sequence takes one of the
                formats ``list`` (``'a', 'b' and 3 more``, or ``none``), ``list4`` (at most four), ``or``
                (``'a' or 'b'``), or its separator: ``{problems:; }``.
            remedy: template of what to do, over the same names.
            further: other fields of :class:`ErrorCode`.
        """
        return ErrorCode(family=cls, code=code, cause=cause, happened=happened, remedy=remedy, **further)

    @classmethod
    def _fields(cls) -> list[str]:
        """Names of the data that instances carry, those of base classes first."""
        return [
            name
            for klass in reversed(cls.__mro__)
            if klass not in (NxdtError, Exception, BaseException, object)
            for name, annotation in vars(klass).get("__annotations__", {}).items()
            if not str(annotation).startswith("ClassVar")
        ]

    def __reduce__(self) -> Any:
        if self._names is None:
            return _restored, (type(self), NxdtError._view(self))
        what, do = (text.replace("{", "{{").replace("}", "}}") for text in (self.what(), self.do()))
        row = {"code": self.code, "exit_status": self.exit_status, "happened": what, "remedy": do}
        values = {name: getattr(self, name) for name in self._names}
        return _restored, (type(self), {**values, **row, "_names": self._names})

    def what(self) -> str:
        """Return one sentence: what was found."""
        return self.happened.format(**self._view())

    def do(self) -> str:
        """Return one sentence: what the user can do about it."""
        return self.remedy.format(**self._view())

    def _view(self) -> dict[str, Any]:
        """Values that the two templates may name; subclasses add what they compute."""
        if self._names is None:
            return {name: getattr(self, name) for name in self._fields()}
        values = {name: getattr(self, name) for name in self._names}
        listed = {name: _Listed(value) for name, value in values.items() if type(value) in (tuple, list)}
        return {**values, **listed, **(self._also(self) if self._also else {})}

    def __str__(self) -> str:
        return visible(f"[{self.code}] {self.what()}\n  {self.do()}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorCode(Generic[E]):
    """A row of the catalogue of errors: called with the values of its templates, it gives the error to raise.

    Example::

        NoRows = NxdtError.define("ACME-1", "A file without rows.", "{path} has no rows.", "Correct the path.")
        raise NoRows(path="chats.jsonl")
    """

    family: type[E]
    """Class of the error: what code catches."""
    code: str
    cause: str
    happened: str
    remedy: str
    usual_remedy: str = ""
    """General advice, where ``remedy`` depends on what was found."""
    example: Mapping[str, Any] = field(default_factory=dict)
    """Values of a case that users meet, for ``nxdt explain`` and the page of error codes."""
    exit_status: int = 2
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values that a call may leave out."""
    also: Callable[[Any], Mapping[str, Any]] | None = None
    """Further values of the templates, computed from those of the call, which are attributes of its argument."""

    def __call__(self, **values: Any) -> E:
        """Return the error.

        Raises:
            KeyError: a value of a template is missing.
        """
        error = self.family.__new__(self.family)
        own = {"code": self.code, "exit_status": self.exit_status, "happened": self.happened, "remedy": self.remedy}
        given = {**self.defaults, **values}
        vars(error).update(given, **own, usual_remedy=self.usual_remedy, _names=tuple(given), _also=self.also)
        view = error._view()
        for template in (self.happened, self.remedy):  # a missing value is found here, and not when it is printed
            template.format(**view)
        return error


class _Listed(tuple[Any, ...]):
    """A sequence in a template, with the formats that :meth:`NxdtError.define` names."""

    __slots__ = ()

    def __format__(self, spec: str) -> str:
        if spec.startswith("list"):
            return listing(self, int(spec.removeprefix("list") or 8)) or "none"
        return one_of(self) if spec == "or" else spec.join(map(str, self)) if spec else str(tuple(self))


def _restored(cls: type[NxdtError], state: dict[str, Any]) -> NxdtError:
    error = cls.__new__(cls)
    vars(error).update(state)
    return error


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


def unusable(plugins: Sequence[str]) -> str:
    """Return the sentence on plugins that are installed and cannot be used, from one for each; empty without any."""
    return f" Installed but unusable: {'; '.join(plugins)}." if plugins else ""
