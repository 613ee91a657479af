"""Errors of devices, layouts and launch: codes ``NXDT-P…``."""

from __future__ import annotations

from typing import Any

from nxdt_core.errors.base import NxdtError, listing

__all__ = [
    "AcceleratorMissing",
    "BadDeviceProfile",
    "CompileCacheNotAFolder",
    "CompileCacheNotWritable",
    "CompileIsOff",
    "EngineCannotCompileAhead",
    "EngineWithoutEstimate",
    "HeadsDoNotDivide",
    "NoLayoutFits",
    "NoTimesOfDevice",
    "SequenceDoesNotDivide",
    "ShardDoesNotDivide",
    "TensorPlanUnusable",
    "TwoMemorySizes",
    "UnknownAccelerator",
    "UnknownDevice",
    "WorldDoesNotDivide",
]


class UnknownAccelerator(NxdtError):
    """A device type that no profile describes."""

    code = "NXDT-P001"
    happened = "trainer.accelerator names no device type: {accelerator!r}."
    remedy = "Write one of {names}, or auto."
    accelerator: str
    known: tuple[str, ...]

    def _view(self) -> dict[str, Any]:
        return {**super()._view(), "names": listing(self.known)}


class AcceleratorMissing(NxdtError):
    """A device type that this machine, or this build of torch, does not have."""

    code = "NXDT-P002"
    happened = "trainer.accelerator is {accelerator!r}, and torch finds only {found!r} here."
    remedy = (
        "Install {install}, and the driver, or set trainer.accelerator=auto. 'nxdt env' shows what this machine has."
    )
    accelerator: str
    found: str
    install: str


class WorldDoesNotDivide(NxdtError):
    """A number of processes that does not fill whole copies of the model."""

    code = "NXDT-P003"
    happened = (
        "{world_size} processes do not divide into groups of TP {tp} x PP {pp} x CP {cp}, with dp_replicate "
        "{dp_replicate} dividing what is left and EP {ep} dividing a replica's data and context parallel ranks."
    )
    remedy = "Change trainer.devices x trainer.num_nodes or the sizes of distributed_strategy."
    world_size: int
    tp: int
    pp: int
    cp: int
    dp_replicate: int
    ep: int


class HeadsDoNotDivide(NxdtError):
    """Attention heads that cannot be shared out as wholes."""

    code = "NXDT-P020"
    happened = (
        "{query_heads} query heads and {kv_heads} key/value heads cannot be shared out over {tp} tensor parallel ranks"
        "{reason}."
    )
    remedy = (
        "Set distributed_strategy.tensor_model_parallel_size to a size that divides both numbers of heads, or to a "
        "multiple of the key/value heads that divides the query heads ({possible}); or set "
        "distributed_strategy.pad_heads=true, which fills up with heads of zeros."
    )
    query_heads: int
    kv_heads: int
    tp: int
    reason: str

    def _view(self) -> dict[str, Any]:
        query, kv = self.query_heads, self.kv_heads
        sizes = [n for n in range(1, query + 1) if query % n == 0 and (kv % n == 0 or n % kv == 0)]
        return {**super()._view(), "possible": ", ".join(map(str, sizes))}


class ShardDoesNotDivide(NxdtError):
    """A matrix whose features do not fall into equal parts."""

    code = "NXDT-P021"
    happened = "'{module}' has {size} {features}, which {tp} tensor parallel ranks cannot share in equal parts."
    remedy = "Make it {next_size} (a multiple of {tp}), or change distributed_strategy.tensor_model_parallel_size."
    module: str
    size: int
    features: str
    tp: int

    def _view(self) -> dict[str, Any]:
        return {**super()._view(), "next_size": -(-self.size // self.tp) * self.tp}


class TensorPlanUnusable(NxdtError):
    """A model's plan names something that tensor parallelism cannot shard."""

    code = "NXDT-P022"
    happened = "The plan of {owner} cannot be followed: {problem}."
    remedy = (
        "Correct the plan of the model (or of the adapter that changed it), or train it without tensor parallelism."
    )
    problem: str
    plugin: str = ""
    """The model's name and who brought it; empty where that is not known."""

    def _view(self) -> dict[str, Any]:
        return {**super()._view(), "owner": f"the model {self.plugin}" if self.plugin else "the model"}


class SequenceDoesNotDivide(NxdtError):
    """A sequence that does not fall into equal parts over the ranks of sequence parallelism."""

    code = "NXDT-P023"
    happened = "A sequence of {length} tokens does not fall into {ranks} equal parts for sequence parallelism."
    remedy = "Make data.seq_length a multiple of {ranks}, or set distributed_strategy.sequence_parallel=false."
    length: int
    ranks: int


class EngineWithoutEstimate(NxdtError):
    """An engine is asked for an estimate that it does not offer."""

    code = "NXDT-P005"
    happened = "The parallel engine {engine!r} of {dist} gives no estimate."
    remedy = "Plan with parallel_engine.name=torch, whose memory and traffic may differ; training needs no estimate."
    engine: str
    dist: str


class BadDeviceProfile(NxdtError):
    """A plugin's record of a device type names something else."""

    code = "NXDT-P006"
    happened = "The plugin {plugin!r} describes devices of type {accelerator!r} by {reference}, which is {found}."
    remedy = (
        "Let the record's target be a nxdt_core.devices.DeviceProfile whose device_type is the record's name, or block "
        "the plugin with plugins.block."
    )
    plugin: str
    accelerator: str
    reference: str
    found: str


class UnknownDevice(NxdtError):
    """A product that no device profile knows the memory of."""

    code = "NXDT-P007"
    happened = "No device profile knows the memory of {device!r}."
    remedy = "Write one of {names}, or its memory as --memory-gib."
    device: str
    known: tuple[str, ...]

    def _view(self) -> dict[str, Any]:
        return {**super()._view(), "names": listing(self.known)}


class TwoMemorySizes(NxdtError):
    """Both ways to say how much memory a device has."""

    code = "NXDT-P008"
    happened = "--device and --memory-gib both say how much memory a device has."
    remedy = "Give one of them."


class NoTimesOfDevice(NxdtError):
    """A search ranks layouts by time, which needs figures that are not known for the product."""

    code = "NXDT-P009"
    happened = "The time of a step on {device} in {dtype} cannot be estimated: its peak or its links are not known."
    remedy = (
        "Search for a product whose figures are known, such as --device H100, or compare the memory of layouts with "
        "nxdt plan --device {device}, one at a time."
    )
    device: str
    dtype: str


class NoLayoutFits(NxdtError):
    """Every layout of a search needs more memory than a device has."""

    code = "NXDT-P010"
    happened = "None of {tried} layouts leaves a tenth of the memory of {device} free."
    remedy = (
        "Give the run more devices (--world-size), make data.micro_batch_size or data.seq_length smaller, or choose "
        "a precision with smaller state."
    )
    device: str
    tried: int


class EngineCannotCompileAhead(NxdtError):
    """``nxdt compile`` with an engine that fills no cache of compiled graphs."""

    code = "NXDT-P100"
    happened = "The parallel engine {engine!r} of {dist} cannot compile ahead of a run."
    remedy = "Start the run itself: `nxdt train` compiles what the engine compiles at its first step."
    engine: str
    dist: str


class CompileIsOff(NxdtError):
    """``nxdt compile`` of a run that compiles nothing."""

    code = "NXDT-P101"
    happened = "model.compile is false, so the parallel engine {engine!r} compiles nothing in this run."
    remedy = "Set model.compile=true, for `nxdt train` too; or run `nxdt train` without compiling ahead."
    engine: str


class CompileCacheNotWritable(NxdtError):
    """The folder for compiled graphs cannot be written."""

    code = "NXDT-P102"
    happened = "Compiled graphs cannot be kept in {path}: {reason}."
    remedy = "Let {setting} name a folder that this user may write."
    path: str
    reason: str
    setting: str
    """Key or variable that names the folder, or that would change it."""


class CompileCacheNotAFolder(NxdtError):
    """An address for compiled graphs that the engine cannot use."""

    code = "NXDT-P103"
    happened = (
        "compiler_cache_url is {address!r}, and the parallel engine {engine!r} keeps compiled graphs in a folder."
    )
    remedy = "Write a path, such as one on a file system that all nodes share, or file:///absolute/path."
    address: str
    engine: str
