"""Errors of pairs of answers, and of losses that compare them: codes ``NXDT-A…``."""

from __future__ import annotations

from nxdt_core.errors import NxdtError

AnswerMissing = NxdtError.define(
    "NXDT-A001",
    "A record that does not say which answer is preferred, or to which.",
    "{place} has no {key!r} answer; its keys are {keys}.",
    "Give every record {wanted}, or take the record out.",
    defaults={"wanted": "'chosen' and 'rejected'"},
)

AnswerEmpty = NxdtError.define(
    "NXDT-A002",
    "An answer that says nothing.",
    "The {key!r} answer of {place} is empty.",
    "Write what was answered, or take the record out.",
)

AnswersEqual = NxdtError.define(
    "NXDT-A003",
    "A pair without a preference.",
    "The chosen and the rejected answer of {place} are the same{where}, so that there is nothing to prefer.",
    "Take the record out.",
    defaults={"where": ""},
)

PromptMissing = NxdtError.define(
    "NXDT-A004",
    "Answers to nothing.",
    "{place} has no prompt: {found}.",
    "Give the record a 'prompt', or 'chosen' and 'rejected' conversations that begin with the same messages.",
)

BadPreference = NxdtError.define(
    "NXDT-A005",
    "A field of a record that is neither a text nor messages.",
    "{key!r} of {place} cannot be read: {reason}.",
    "Write a text, or a list of messages with 'role' and 'content'.",
)

AnswersInseparable = NxdtError.define(
    "NXDT-A006",
    "A template whose prompt changes with the answer.",
    "Where the {key!r} answer of {place} begins is unclear: the chat template renders what precedes it "
    "otherwise once it follows.",
    "Choose another template with data.chat_template.",
)

AnswerOfOthers = NxdtError.define(
    "NXDT-A007",
    "An answer of another role, or a conversation that continues after it.",
    "The {key!r} answer of {place} {end} with a turn of {role!r}, not of the assistant.",
    "Let answers begin and end with turns of the assistant, behind the messages of the prompt or without them.",
)

PromptDiffers = NxdtError.define(
    "NXDT-A008",
    "Whole conversations and a prompt of others.",
    "The 'prompt' of {place} is not what the user says last before 'chosen' and 'rejected' part.",
    "Correct it, or take it out: conversations with a common beginning have their prompt.",
)

LabelMissing = NxdtError.define(
    "NXDT-A009",
    "An answer of which the record does not say whether it is desirable.",
    "The 'label' of {place} {found}.",
    "Write true for a desirable answer and false for an undesirable one, or name the field: data.columns.label=NAME.",
)

NoRoomForAnswers = NxdtError.define(
    "NXDT-A011",
    "Prompts may be as long as a sequence.",
    "data.max_prompt_length is {prompt}, and data.seq_length {sequence}: a cut prompt leaves no answer.",
    "Make max_prompt_length smaller than seq_length by what answers need.",
)

EmptySplit = NxdtError.define(
    "NXDT-A012",
    "A share of so few records that one side gets none.",
    "data.validation_fraction {fraction} of {records} records leaves none to {split}.",
    "Change the share, name data.validation_files, or set data.validation_fraction to 0 to train without validation.",
)

PairsCutAlike = NxdtError.define(
    "NXDT-A013",
    "A split of pairs that differ only behind where they are cut.",
    "Cut to data.seq_length {seq_length}, both answers are the same in each of {pairs} pairs of {split} data.",
    "Raise data.seq_length, or lower data.max_prompt_length.",
)

LabelsAlike = NxdtError.define(
    "NXDT-A014",
    "Training data with desirable answers alone, or with undesirable ones alone.",
    "The 'label' of all {records} records of {split} data is {label}: KTO learns from answers of both kinds.",
    "Add records of the other kind to data.{split}_files.",
)

PairTooLong = NxdtError.define(
    "NXDT-A015",
    "A prompt that does not fit into a sequence with its answers, where that is refused.",
    "The prompt of {place} and its longer answer have {tokens} tokens, and data.seq_length is {seq_length}.",
    "Raise data.seq_length, leave such records out with data.bad_records: drop, or cut them with data.truncation_mode: "
    "keep_start or keep_end.",
)

ReferenceMissing = NxdtError.define(
    "NXDT-A020",
    "DPO received a batch without log-probabilities of the reference.",
    "The objective {objective!r} got a batch without log-probabilities of the reference.",
    "In a custom loop, wrap the dataset with nxdt_core.train.weights.reference before the first step.",
    defaults={"objective": "dpo"},
)

RowsNotPaired = NxdtError.define(
    "NXDT-A021",
    "A preference loss received samples that are not pairs.",
    "The objective {objective!r} compares two answers, and the samples of the data have {rows} row(s).",
    "Set data.name to preference, or choose another objective.",
)

LabelsNotRead = NxdtError.define(
    "NXDT-A022",
    "KTO received samples that are not answers with labels, or a batch that its prepare has not seen.",
    "The objective 'kto' takes answers with labels and a KL over the global batch, and the batch has none.",
    "Set data.name to unpaired-preference. In a custom loop, call nxdt_core.protocols.parallel_model.prepare first.",
)
