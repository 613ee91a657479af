"""Errors of a teacher: codes ``NXDT-B…``."""

from __future__ import annotations

from nxdt_core.errors import NxdtError

TeacherMissing = NxdtError.define(
    "NXDT-B001",
    "The distillation loss of a custom loop has no teacher.",
    "The objective 'distill' got logits, and no teacher to compare them with.",
    "Train through nxdt_core.train.TrainSession, which loads objective.teacher, or call take_teacher and prepare.",
)

TeacherVocabularyDiffers = NxdtError.define(
    "NXDT-B002",
    "A teacher whose vocabulary has another size, where it is not known that ids mean the same tokens.",
    "The teacher {teacher} knows {theirs} tokens, and the model {own}: {reason}.",
    "Choose a teacher that has a row for each id. Where a tokenizer is unknown and ids mean the same tokens in both, "
    "set objective.check_tokenizer to false.",
)

TeacherTokenizerDiffers = NxdtError.define(
    "NXDT-B003",
    "A teacher that was trained with another tokenizer.",
    "The tokenizer of the teacher {teacher} is not that of the data.",
    "Set data.tokenizer to the teacher's. Where ids mean the same tokens in both, set objective.check_tokenizer to "
    "false.",
)

TeacherGivesScores = NxdtError.define(
    "NXDT-B004",
    "A teacher that is a reward model.",
    "The teacher {teacher} gives scores (model.score_head), and distillation compares logits.",
    "Choose a language model as the teacher.",
)

NoPrompts = NxdtError.define(
    "NXDT-B006",
    "On-policy distillation on data whose sequences do not begin with a prompt.",
    "objective.on_policy is {share}, and {reason}.",
    "Set data.name to sft-chat and data.packing to false, or objective.on_policy to 0.",
)

PromptTooLong = NxdtError.define(
    "NXDT-B007",
    "A prompt that leaves no room for an answer.",
    "A prompt has {tokens} tokens. With answers of {most} tokens, it is longer than data.seq_length, {window}.",
    "Make objective.max_completion_length or the prompts smaller, or data.seq_length larger.",
)

TopKTooLarge = NxdtError.define(
    "NXDT-B005",
    "More tokens to compare than the vocabulary has.",
    "objective.top_k is {top_k}, and the teacher {teacher} knows {tokens} tokens.",
    "Make it smaller, or leave it out to compare all tokens.",
)
