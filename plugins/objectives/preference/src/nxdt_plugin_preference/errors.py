"""What can be wrong with pairs of answers, and with a loss that compares: codes ``NXDT-A…``."""

from __future__ import annotations

from nxdt_core.errors import NxdtError

__all__ = [
    "AnswerEmpty",
    "AnswerMissing",
    "AnswerOfOthers",
    "AnswersEqual",
    "AnswersInseparable",
    "BadPreference",
    "EmptySplit",
    "NoRoomForAnswers",
    "PairsCutAlike",
    "PromptDiffers",
    "PromptMissing",
    "ReferenceMissing",
    "RowsNotPaired",
]


class AnswerMissing(NxdtError):
    """A record that does not say which answer is preferred, or to which."""

    code = "NXDT-A001"
    happened = "{place} has no {key!r} answer; its keys are {keys}."
    remedy = "Give every record 'chosen' and 'rejected', or take the record out."
    place: str
    key: str
    keys: str


class AnswerEmpty(NxdtError):
    """An answer that says nothing."""

    code = "NXDT-A002"
    happened = "The {key!r} answer of {place} is empty."
    remedy = "Write what was answered, or take the record out."
    place: str
    key: str


class AnswersEqual(NxdtError):
    """A pair without a preference."""

    code = "NXDT-A003"
    happened = "The chosen and the rejected answer of {place} are the same{where}, so that there is nothing to prefer."
    remedy = "Take the record out."
    place: str
    where: str = ""
    """Where they differ in the record."""


class PromptMissing(NxdtError):
    """Answers to nothing."""

    code = "NXDT-A004"
    happened = "{place} has no prompt: {found}."
    remedy = "Give the record a 'prompt', or 'chosen' and 'rejected' conversations that begin with the same messages."
    place: str
    found: str


class BadPreference(NxdtError):
    """A field of a record that is neither a text nor messages."""

    code = "NXDT-A005"
    happened = "{key!r} of {place} cannot be read: {reason}."
    remedy = "Write a text, or a list of messages with 'role' and 'content'."
    place: str
    key: str
    reason: str


class AnswersInseparable(NxdtError):
    """A template whose prompt changes with the answer."""

    code = "NXDT-A006"
    happened = "Where the {key!r} answer of {place} begins is unclear: the chat template renders what precedes it "
    happened += "otherwise once it follows."
    remedy = "Choose another template with data.chat_template."
    place: str
    key: str


class AnswerOfOthers(NxdtError):
    """An answer of another role, or a conversation that continues after it."""

    code = "NXDT-A007"
    happened = "The {key!r} answer of {place} {end} with a turn of {role!r}, not of the assistant."
    remedy = "Let answers begin and end with turns of the assistant, behind the messages of the prompt or without them."
    place: str
    key: str
    end: str
    """``begins`` or ``ends``."""
    role: str


class PromptDiffers(NxdtError):
    """Whole conversations and a prompt of others."""

    code = "NXDT-A008"
    happened = "The 'prompt' of {place} is not what the user says last before 'chosen' and 'rejected' part."
    remedy = "Correct it, or take it out: conversations with a common beginning have their prompt."
    place: str


class NoRoomForAnswers(NxdtError):
    """Prompts may be as long as a sequence."""

    code = "NXDT-A011"
    happened = "data.max_prompt_length is {prompt}, and data.seq_length {sequence}: a cut prompt leaves no answer."
    remedy = "Make max_prompt_length smaller than seq_length by what answers need."
    prompt: int
    sequence: int


class EmptySplit(NxdtError):
    """A share of so few records that one side gets none."""

    code = "NXDT-A012"
    happened = "data.validation_fraction {fraction} of {records} records leaves none to {split}."
    remedy = "Change the share, or name data.validation_files."
    fraction: float
    records: int
    split: str


class PairsCutAlike(NxdtError):
    """A split of pairs that differ only behind where they are cut."""

    code = "NXDT-A013"
    happened = (
        "Cut to data.seq_length {seq_length}, both answers are the same in each of {pairs} pairs of {split} data."
    )
    remedy = "Raise data.seq_length, or lower data.max_prompt_length."
    seq_length: int
    pairs: int
    split: str


class ReferenceMissing(NxdtError):
    """DPO received a batch without log-probabilities of the reference."""

    code = "NXDT-A020"
    happened = "The objective 'dpo' got a batch without log-probabilities of the reference."
    remedy = "In a custom loop, wrap the dataset with nxdt_core.training.weights.reference before the first step."


class RowsNotPaired(NxdtError):
    """A preference loss received samples that are not pairs."""

    code = "NXDT-A021"
    happened = "The objective {objective!r} compares two answers, and the samples of the data have {rows} row(s)."
    remedy = "Set data.name to preference, or choose another objective."
    objective: str
    rows: int
