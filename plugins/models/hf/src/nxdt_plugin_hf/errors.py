"""Errors of this plugin: codes ``NXDT-M08…``."""

from __future__ import annotations

from nxdt_core.errors import NxdtError

__all__ = [
    "ArchitectureUnknown",
    "ConfigurationRefused",
    "DirectoryFormUnknown",
    "NotACausalLM",
    "OwnCodeRefused",
    "PackageMissing",
    "UnsupportedArchitecture",
]


class PackageMissing(NxdtError):
    """A package that the model's code is written with is not installed."""

    code = "NXDT-M080"
    happened = "{wanted} needs a package that cannot be imported: {reason}."
    remedy = "pip install '{package}'"
    wanted: str
    reason: str
    package: str


class ArchitectureUnknown(NxdtError):
    """The installed transformers has no code for the model."""

    code = "NXDT-M081"
    happened = "transformers {version} knows no model_type {model_type!r}.{close}"
    remedy = "pip install --upgrade 'transformers<6', if a newer one has it; else take a model that is part of it."
    model_type: str
    version: str
    close: str = ""


class OwnCodeRefused(NxdtError):
    """The configuration requires Python code from its own directory."""

    code = "NXDT-M082"
    happened = "config.json requires custom code (auto_map: {classes}); transformers does not implement {model_type!r}."
    remedy = "Code from model directories is never run. Install a plugin that has this model, or write one."
    model_type: str
    classes: str


class NotACausalLM(NxdtError):
    """An encoder, an encoder with a decoder, or a model of something else than text."""

    code = "NXDT-M083"
    happened = "{model} does not predict the next token from those before it: {reason}."
    remedy = "Take a decoder: a config.json whose architecture is one of transformers' …ForCausalLM."
    model: str
    reason: str


class ConfigurationRefused(NxdtError):
    """transformers does not accept the configuration's values."""

    code = "NXDT-M084"
    happened = "transformers refuses the configuration of {model_type!r}: {reason}."
    remedy = "Correct config.json, or the keys of model.hf_config."
    model_type: str
    reason: str


class UnsupportedArchitecture(NxdtError):
    """The model's code does not leave attention or experts to others, or does something that would be lost so."""

    code = "NXDT-M085"
    happened = "{model} cannot be trained here: {reason}."
    remedy = "Take another architecture, or a plugin with a builder for this one."
    model: str
    reason: str


class DirectoryFormUnknown(NxdtError):
    """transformers makes a parameter of tensors that are more than stacked or renamed."""

    code = "NXDT-M086"
    happened = "Directories of {model} hold '{parameter}' in a form that is not known here."
    remedy = "Train from fresh weights and keep its checkpoints as they are; it has no Hugging Face form."
    model: str
    parameter: str
