"""Errors of this plugin: codes ``NXDT-N0…``."""

from __future__ import annotations

from nxdt_core.errors import NxdtError

_INDEX = "--extra-index-url https://pip.repos.neuron.amazonaws.com"
_FITTING = "torch 2.9 with torch-xla 2.9 and the neuronx-distributed of a Neuron SDK up to 2.31"
_PAIRS = (
    "parallel_engine.name=nxd, on trn1 and trn2: torch 2.9 with torch-xla 2.9, torch-neuronx 2.9 and a Neuron SDK up "
    "to 2.31. parallel_engine.name=torch, on trn2 and trn3: torch 2.13 with torch-neuronx 2.13, or torch 2.14 with "
    "torch-neuronx 2.14; neither has torch-xla."
)

LibraryMissing = NxdtError.define(
    "NXDT-N001",
    "A package that the engine hands the model to is not installed.",
    "The engine nxd needs {package}, which is not installed.",
    f"Install {_FITTING}: `pip install neuronx-distributed torch-neuronx neuronx-cc {_INDEX}`. "
    "On a device that stock PyTorch drives, or without one, use parallel_engine.name=torch.",
)

LibraryPlaceholder = NxdtError.define(
    "NXDT-N002",
    "A package of that name comes from PyPI, where it is empty and refuses to be imported.",
    "The installed {package} is PyPI's placeholder and not AWS's package.",
    f"Replace it: `pip uninstall {{package}}`, then `pip install {{package}} {_INDEX}`.",
)

LibraryBroken = NxdtError.define(
    "NXDT-N003",
    "The library is there and cannot be imported.",
    "{package} cannot be imported: {reason}.",
    f"Install packages of one Neuron SDK: {_FITTING}. The library also needs transformers older than 5, or none.",
)

VersionsDoNotFit = NxdtError.define(
    "NXDT-N004",
    "An installed package was built for another version of torch.",
    "torch {torch} and {package} {version} are installed, but {package} requires the matching version of torch.",
    f"Install versions that fit. {_PAIRS}",
)

PlanNotExpressible = NxdtError.define(
    "NXDT-N010",
    "A model's plan asks for something that the library's layers do not do.",
    "The engine nxd cannot shard {model} over tensor parallel ranks: {problem}.",
    "Set distributed_strategy.tensor_model_parallel_size=1, or use parallel_engine.name=torch.",
)

VocabularyIsSharded = NxdtError.define(
    "NXDT-N012",
    "An objective computes with logits of which each rank holds a part.",
    "The objective reads {attribute!r} of logits, of which each tensor parallel rank holds a part.",
    "Let it call nxdt_core.models.loss.cross_entropies, or set distributed_strategy.tensor_model_parallel_size=1.",
)


RanksPlacedOtherwise = NxdtError.define(
    "NXDT-N013",
    "The library arranges ranks in another order than a run's data and checkpoints follow.",
    "neuronx-distributed places rank {rank} at {library}, and the run at {run}: for these sizes it groups ranks "
    "that are not neighbours.",
    "Change distributed_strategy.tensor_model_parallel_size.",
    also=lambda error: {
        order: ", ".join(f"{name} {index}" for name, index in getattr(error, order).items())
        for order in ("library", "run")
    },
)

LayoutNotOnHardware = NxdtError.define(
    "NXDT-N014",
    "A layout that the chips, or the library on them, do not run.",
    "{platform} does not run this layout: {reason}.",
    "Change the layout: {advice}. docs/trainium.md names the sources of these rules.",
)

CompileToolMissing = NxdtError.define(
    "NXDT-N020",
    "The program that compiles graphs ahead of a run is not installed.",
    "`nxdt compile` needs the program {tool}, which is not on the PATH.",
    f"It comes with torch-neuronx: `pip install torch-neuronx neuronx-cc {_INDEX}`.",
)

HostCompilesNothing = NxdtError.define(
    "NXDT-N021",
    "Compiling ahead of a run in the library's CPU mode.",
    "{variable} is set, and in the CPU mode of neuronx-distributed nothing is compiled.",
    "Unset {variable}, or start `nxdt train` at once.",
)

CacheNotReachable = NxdtError.define(
    "NXDT-N022",
    "An address for compiled graphs that the Neuron cache does not serve.",
    "{origin} is {address!r}, and the Neuron cache of compiled graphs is a folder or s3://bucket/prefix.",
    "Write a path, or s3://bucket/prefix.",
)
