"""Errors of this plugin: codes ``NXDT-M08…``."""

from __future__ import annotations

from nxdt_core.errors import NxdtError

PackageMissing = NxdtError.define(
    "NXDT-M080",
    "A package that the model's code is written with is not installed.",
    "{wanted} needs a package that cannot be imported: {reason}.",
    "pip install '{package}'",
)

ArchitectureUnknown = NxdtError.define(
    "NXDT-M081",
    "The installed transformers has no code for the model.",
    "transformers {version} knows no model_type {model_type!r}.{close}",
    "pip install --upgrade 'transformers<6', if a newer one has it; else take a model that is part of it.",
    defaults={"close": ""},
)

OwnCodeRefused = NxdtError.define(
    "NXDT-M082",
    "The configuration requires Python code from its own directory.",
    "config.json requires custom code (auto_map: {classes}); transformers does not implement {model_type!r}.",
    "Code from model directories is never run. Install a plugin that has this model, or write one.",
)

NotACausalLM = NxdtError.define(
    "NXDT-M083",
    "An encoder, an encoder with a decoder, or a model of something else than text.",
    "{model} does not predict the next token from those before it: {reason}.",
    "Take a decoder: a config.json whose architecture is one of transformers' …ForCausalLM.",
)

ConfigurationRefused = NxdtError.define(
    "NXDT-M084",
    "transformers does not accept the configuration's values.",
    "transformers refuses the configuration of {model_type!r}: {reason}.",
    "Correct config.json, or the keys of model.hf_config.",
)

UnsupportedArchitecture = NxdtError.define(
    "NXDT-M085",
    "The model's code does not leave attention or experts to others, or does something that would be lost so.",
    "{model} cannot be trained here: {reason}.",
    "Take another architecture, or a plugin with a builder for this one.",
)

DirectoryFormUnknown = NxdtError.define(
    "NXDT-M086",
    "transformers makes a parameter of tensors that are more than stacked or renamed.",
    "Directories of {model} hold '{parameter}' in a form that is not known here.",
    "Train from fresh weights and keep its checkpoints as they are; it has no Hugging Face form.",
)
