"""Errors of this plugin: codes ``NXDT-N0…``."""

from __future__ import annotations

from typing import Any

from nxdt_core.errors import NxdtError

__all__ = [
    "CacheNotReachable",
    "CompileToolMissing",
    "HostCompilesNothing",
    "LayoutNotOnHardware",
    "LibraryBroken",
    "LibraryMissing",
    "LibraryPlaceholder",
    "PlanNotExpressible",
    "RanksPlacedOtherwise",
    "VersionsDoNotFit",
    "VocabularyIsSharded",
]

_INDEX = "--extra-index-url https://pip.repos.neuron.amazonaws.com"
_FITTING = "torch 2.9 with torch-xla 2.9 and the neuronx-distributed of a Neuron SDK up to 2.31"
_PAIRS = (
    "parallel_engine.name=nxd, on trn1 and trn2: torch 2.9 with torch-xla 2.9, torch-neuronx 2.9 and a Neuron SDK up "
    "to 2.31. parallel_engine.name=torch, on trn2 and trn3: torch 2.13 with torch-neuronx 2.13, or torch 2.14 with "
    "torch-neuronx 2.14; neither has torch-xla."
)


class LibraryMissing(NxdtError):
    """A package that the engine hands the model to is not installed."""

    code = "NXDT-N001"
    happened = "The engine nxd needs {package}, which is not installed."
    remedy = (
        f"Install {_FITTING}: `pip install neuronx-distributed torch-neuronx neuronx-cc {_INDEX}`. "
        "On a device that stock PyTorch drives, or without one, use parallel_engine.name=torch."
    )
    package: str


class LibraryPlaceholder(NxdtError):
    """A package of that name comes from PyPI, where it is empty and refuses to be imported."""

    code = "NXDT-N002"
    happened = "The installed {package} is PyPI's placeholder and not AWS's package."
    remedy = f"Replace it: `pip uninstall {{package}}`, then `pip install {{package}} {_INDEX}`."
    package: str


class LibraryBroken(NxdtError):
    """The library is there and cannot be imported."""

    code = "NXDT-N003"
    happened = "{package} cannot be imported: {reason}."
    remedy = (
        f"Install packages of one Neuron SDK: {_FITTING}. The library also needs transformers older than 5, or none."
    )
    package: str
    reason: str


class VersionsDoNotFit(NxdtError):
    """An installed package was built for another version of torch."""

    code = "NXDT-N004"
    happened = (
        "torch {torch} and {package} {version} are installed, but {package} requires the matching version of torch."
    )
    remedy = f"Install versions that fit. {_PAIRS}"
    torch: str
    package: str
    version: str


class PlanNotExpressible(NxdtError):
    """A model's plan asks for something that the library's layers do not do."""

    code = "NXDT-N010"
    happened = "The engine nxd cannot shard {model} over tensor parallel ranks: {problem}."
    remedy = "Set distributed_strategy.tensor_model_parallel_size=1, or use parallel_engine.name=torch."
    model: str
    problem: str


class VocabularyIsSharded(NxdtError):
    """An objective computes with logits of which each rank holds a part."""

    code = "NXDT-N012"
    happened = "The objective reads {attribute!r} of logits, of which each tensor parallel rank holds a part."
    remedy = (
        "Let it call nxdt_core.nn.loss.cross_entropy.cross_entropies, or set "
        "distributed_strategy.tensor_model_parallel_size=1."
    )
    attribute: str


class RanksPlacedOtherwise(NxdtError):
    """The library arranges ranks in another order than a run's data and checkpoints follow."""

    code = "NXDT-N013"
    happened = (
        "neuronx-distributed places rank {rank} at {library}, and the run at {run}: for these sizes it groups ranks "
        "that are not neighbours."
    )
    remedy = "Change distributed_strategy.tensor_model_parallel_size."
    rank: int
    library: dict[str, int]
    run: dict[str, int]

    def _view(self) -> dict[str, Any]:
        def shown(place: dict[str, int]) -> str:
            return ", ".join(f"{name} {index}" for name, index in place.items())

        return {**super()._view(), "library": shown(self.library), "run": shown(self.run)}


class LayoutNotOnHardware(NxdtError):
    """A layout that the chips, or the library on them, do not run."""

    code = "NXDT-N014"
    happened = "{platform} does not run this layout: {reason}."
    remedy = "Change the layout: {advice}. docs/trainium.md names the sources of these rules."
    platform: str
    reason: str
    advice: str


class CompileToolMissing(NxdtError):
    """The program that compiles graphs ahead of a run is not installed."""

    code = "NXDT-N020"
    happened = "`nxdt compile` needs the program {tool}, which is not on the PATH."
    remedy = f"It comes with torch-neuronx: `pip install torch-neuronx neuronx-cc {_INDEX}`."
    tool: str


class HostCompilesNothing(NxdtError):
    """Compiling ahead of a run in the library's CPU mode."""

    code = "NXDT-N021"
    happened = "{variable} is set, and in the CPU mode of neuronx-distributed nothing is compiled."
    remedy = "Unset {variable}, or start `nxdt train` at once."
    variable: str


class CacheNotReachable(NxdtError):
    """An address for compiled graphs that the Neuron cache does not serve."""

    code = "NXDT-N022"
    happened = "{origin} is {address!r}, and the Neuron cache of compiled graphs is a folder or s3://bucket/prefix."
    remedy = "Write a path, or s3://bucket/prefix."
    origin: str
    address: str
