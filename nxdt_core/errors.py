"""Every error that a user can cause: a code, what happened, what to do. Bugs are not in here.

The command line prints ``[code] what`` and ``do`` without a traceback and exits with status 2. An error
carries its data as attributes; its sentences are built here and nowhere else. Codes are stable:
``K`` kernel and plugins, ``C`` configuration, ``D`` data and tokenizers, ``M`` models and weights,
``P`` parallelism and launch, ``S`` checkpoints and storage, ``T`` training runs.
"""

from __future__ import annotations

from typing import Any, ClassVar, dataclass_transform

__all__ = ["BadComponentRecord", "NxdtError"]


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
        """One sentence: what was found."""
        return self.happened.format(**self._view())

    def do(self) -> str:
        """One sentence: what the user can do about it."""
        return self.remedy.format(**self._view())

    def _view(self) -> dict[str, Any]:
        """Values that the two templates may name; subclasses add what they compute."""
        return {name: getattr(self, name) for name in self._fields()}

    def __str__(self) -> str:
        return f"[{self.code}] {self.what()}\n  {self.do()}"


def _rebuild(cls: type[NxdtError], data: dict[str, Any]) -> NxdtError:
    return cls(**data)


def listing(names: tuple[str, ...] | list[str], limit: int = 8) -> str:
    """Join names for a sentence: ``'a', 'b' and 3 more``."""
    shown = ", ".join(repr(n) for n in names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


# --- K: kernel and plugins ------------------------------------------------------------------------------


class BadComponentRecord(NxdtError):
    """A record that a plugin yields is malformed."""

    code = "NXDT-K001"
    happened = "{record}.{field} cannot be {found!r}."
    remedy = "Write {field} as {wanted}."
    record: str
    field: str
    found: object

    def _view(self) -> dict[str, Any]:
        wanted = (
            "letters, digits and '_ . + -', starting with a letter or digit"
            if self.field == "name"
            else "'package.module:attribute'"
        )
        return {**super()._view(), "wanted": wanted}


# --- C: configuration -----------------------------------------------------------------------------------


# --- D: data and tokenizers -----------------------------------------------------------------------------


# --- M: models and weights ------------------------------------------------------------------------------


class WeightsDoNotFit(NxdtError):
    """Weights of another model, or a checkpoint that lacks some."""

    code = "NXDT-M050"
    happened = "The weights do not fit the model: {summary}."
    remedy = "Use the configuration that the weights were trained with, or load them with strict=False."
    missing: list[str]
    extra: list[str]
    shapes: list[str]

    def _view(self) -> dict[str, Any]:
        parts = [
            f"{len(names)} {word} ({listing(names, 4)})"
            for names, word in ((self.missing, "missing"), (self.extra, "unknown"), (self.shapes, "of another shape"))
            if names
        ]
        return {**super()._view(), "summary": "; ".join(parts)}


# --- P: parallelism and launch --------------------------------------------------------------------------


# --- S: checkpoints and storage -------------------------------------------------------------------------


# --- T: training runs -----------------------------------------------------------------------------------


class ScheduleHasNoEnd(NxdtError):
    """A decaying learning-rate curve without a last step."""

    code = "NXDT-T001"
    happened = "model.optim.sched: {schedule} decays to an end, and neither it nor the trainer has one."
    remedy = "Set model.optim.sched.max_steps or trainer.max_steps to a positive number."
    schedule: str


class OptimizerStateDoesNotFit(NxdtError):
    """Saved optimizer state of parameters that the model does not train."""

    code = "NXDT-T002"
    happened = "The checkpoint has optimizer state of {count} parameters that this run does not train ({names})."
    remedy = (
        "Resume with the model and adapter of the checkpoint, or load its weights only: model.weight_init_only=true."
    )
    parameters: list[str]

    def _view(self) -> dict[str, Any]:
        return {**super()._view(), "count": len(self.parameters), "names": listing(self.parameters, 4)}


class OptimizerStateNotTensor(NxdtError):
    """An optimizer keeps state that no checkpoint can hold."""

    code = "NXDT-T003"
    happened = "The optimizer keeps {state!r} of {parameter!r} as a {found}, which a checkpoint cannot hold."
    remedy = "Keep state per parameter as tensors, ints, floats or bools."
    parameter: str
    state: str
    found: str
