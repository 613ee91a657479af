"""Errors of judging a model by what it writes: codes ``NXDT-E…``."""

from __future__ import annotations

from typing import Any

from nxdt_core.errors.base import NxdtError, listing

__all__ = [
    "ChatTemplateMissing",
    "EvaluationLibraryMissing",
    "NoAnswerToJudge",
    "NothingToJudge",
    "QuestionTooLong",
    "TaskRecordUnscorable",
    "TaskSamplesOtherwise",
    "TaskUnknown",
    "TaskUnusable",
]


class ChatTemplateMissing(NxdtError):
    """Messages, and nothing that says how they are written."""

    code = "NXDT-E001"
    happened = "{place} has messages, and the tokenizer brings no chat template."
    remedy = "Take a tokenizer with a template, or name one where the data's section has a key for it."
    place: str


class NoAnswerToJudge(NxdtError):
    """A record without a question and a wanted answer."""

    code = "NXDT-E003"
    happened = "{place} cannot be judged: {reason}."
    remedy = (
        "Give 'messages' or 'conversations' that end with the assistant's turn, 'input' and 'output', or 'prompt' and "
        "'answer'."
    )
    place: str
    reason: str


class NothingToJudge(NxdtError):
    """Neither records nor tasks."""

    code = "NXDT-E004"
    happened = "There is nothing to judge by: {found}."
    remedy = "Name files with held-out records, or tasks with --task."
    found: str


class EvaluationLibraryMissing(NxdtError):
    """A metric whose library is not installed."""

    code = "NXDT-E005"
    happened = "{needed_by} need {library}, which cannot be imported: {reason}."
    remedy = "pip install 'nxdt-core[{extra}]'"
    needed_by: str
    library: str
    extra: str
    reason: str


class TaskUnknown(NxdtError):
    """A task that the harness does not have."""

    code = "NXDT-E006"
    happened = "The harness has no task {task!r}{near}."
    remedy = "Look at its list (lm-eval ls tasks), or name the directory of your own tasks with --task-path."
    task: str
    candidates: tuple[str, ...] = ()

    def _view(self) -> dict[str, Any]:
        near = f"; it has {listing(self.candidates)}" if self.candidates else ""
        return {**super()._view(), "near": near}


class TaskUnusable(NxdtError):
    """A task whose records or templates the harness cannot use."""

    code = "NXDT-E010"
    happened = "The harness cannot run {tasks}: {reason}."
    remedy = (
        "See that its data are there, or can be fetched from here, and that its templates fit them; the library says "
        "more with: lm-eval validate --tasks TASK."
    )
    tasks: str
    reason: str


class TaskRecordUnscorable(NxdtError):
    """An answer whose probability cannot be told."""

    code = "NXDT-E007"
    happened = "An answer of the task cannot be scored: {reason}."
    remedy = "Correct the record, or take a task whose answers this model can be asked."
    reason: str


class TaskSamplesOtherwise(NxdtError):
    """A task whose tokens are to be chosen in a way that is not known here."""

    code = "NXDT-E008"
    happened = "The task asks for {name}: {value}, which is not known here."
    remedy = "Its generation_kwargs may have {understood}."
    name: str
    value: object
    known: tuple[str, ...]

    def _view(self) -> dict[str, Any]:
        return {**super()._view(), "understood": listing(self.known)}


class QuestionTooLong(NxdtError):
    """A question of which the model would see the end alone."""

    code = "NXDT-E009"
    happened = (
        "The question of {place} has {tokens} tokens, and the model sees {window} at once (data.seq_length "
        "of its run), what it answers included."
    )
    remedy = "Shorten the question or leave the record out (--limit takes the first records alone)."
    place: str
    tokens: int
    window: int
