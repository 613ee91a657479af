"""Errors of rewards and prompts: codes ``NXDT-R…``."""

from __future__ import annotations

from nxdt_core.errors import NxdtError

RewardFailed = NxdtError.define(
    "NXDT-R001",
    "A reward function that raised, or returned something else than a number of float32 for each answer.",
    "The reward {reward!r} {found}, for answers to {place}.",
    "Correct the reward or the record. Nothing of this step has changed the model.",
)

RewardMisnamed = NxdtError.define(
    "NXDT-R002",
    "An entry of objective.rewards that is not a name with options.",
    "objective.rewards[{number}] {reason}.",
    "Write a name, or a mapping of 'name', 'weight' and the reward's own keys.",
)

PromptMissing = NxdtError.define(
    "NXDT-R003",
    "A record without a prompt.",
    "{place} has no 'prompt' that is a text or a list of messages; its keys are {keys}.",
    "Give the record a prompt, or name the column that has it in data.columns.",
)

PromptTooLong = NxdtError.define(
    "NXDT-R004",
    "A prompt that leaves no room for an answer.",
    "The prompt of {place} has {tokens} tokens. With objective.max_completion_length {most} it does not fit into "
    "data.seq_length {window}.",
    "Raise data.seq_length, or take the record out.",
)

RewardModelUnfit = NxdtError.define(
    "NXDT-R006",
    "A reward model that cannot score the answers.",
    "The reward model {path} {reason}.",
    "Name a sequence classifier with one label, or a run of the objective 'reward'; it has the tokenizer of the data.",
)

NoPrompts = NxdtError.define(
    "NXDT-R005",
    "GRPO received samples that are not prompts.",
    "The objective 'grpo' generates answers to prompts, and the samples of the data have no record of one.",
    "Set data.name to prompts.",
)
