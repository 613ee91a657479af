"""Errors of devices, layouts and launch: codes ``NXDT-P…``."""

from __future__ import annotations

from typing import Any

from nxdt_core.errors.base import NxdtError

UnknownAccelerator = NxdtError.define(
    "NXDT-P001",
    "A device type that no profile describes.",
    "trainer.accelerator names no device type: {accelerator!r}.",
    "Write one of {known:list}, or auto.",
)

AcceleratorMissing = NxdtError.define(
    "NXDT-P002",
    "A device type that this machine, or this build of torch, does not have.",
    "trainer.accelerator is {accelerator!r}, and torch finds only {found!r} here.",
    "Install {install}, and the driver, or set trainer.accelerator=auto. 'nxdt env' shows what this machine has.",
)


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


def _heads_do_not_divide(error: Any) -> dict[str, Any]:
    query, kv = (error.query_heads, error.kv_heads)
    sizes = [n for n in range(1, query + 1) if query % n == 0 and (kv % n == 0 or n % kv == 0)]
    return {"possible": ", ".join(map(str, sizes))}


HeadsDoNotDivide = NxdtError.define(
    "NXDT-P020",
    "Attention heads that cannot be shared out as wholes.",
    "{query_heads} query heads and {kv_heads} key/value heads cannot be shared out over {tp} tensor parallel ranks"
    "{reason}.",
    "Set distributed_strategy.tensor_model_parallel_size to a size that divides both numbers of heads, or to a "
    "multiple of the key/value heads that divides the query heads ({possible}); or set "
    "distributed_strategy.pad_heads=true, which fills up with heads of zeros.",
    also=_heads_do_not_divide,
)

ShardDoesNotDivide = NxdtError.define(
    "NXDT-P021",
    "A matrix whose features do not fall into equal parts.",
    "'{module}' has {size} {features}, which {tp} tensor parallel ranks cannot share in equal parts.",
    "Make it {next_size} (a multiple of {tp}), or change distributed_strategy.tensor_model_parallel_size.",
    also=lambda error: {"next_size": -(-error.size // error.tp) * error.tp},
)


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


SequenceDoesNotDivide = NxdtError.define(
    "NXDT-P023",
    "A sequence that does not fall into equal parts over the ranks of sequence parallelism.",
    "A sequence of {length} tokens does not fall into {ranks} equal parts for sequence parallelism.",
    "Make data.seq_length a multiple of {ranks}, or set distributed_strategy.sequence_parallel=false.",
)


class EngineWithoutEstimate(NxdtError):
    """An engine is asked for an estimate that it does not offer."""

    code = "NXDT-P005"
    happened = "The parallel engine {engine!r} of {dist} gives no estimate."
    remedy = "Plan with parallel_engine.name=torch, whose memory and traffic may differ; training needs no estimate."
    engine: str
    dist: str


BadDeviceProfile = NxdtError.define(
    "NXDT-P006",
    "A plugin's record of a device type names something else.",
    "The plugin {plugin!r} describes devices of type {accelerator!r} by {reference}, which is {found}.",
    "Let the record's target be a nxdt_core.distributed.devices.DeviceProfile whose device_type is the record's "
    "name, or block "
    "the plugin with plugins.block.",
)

UnknownDevice = NxdtError.define(
    "NXDT-P007",
    "A product that no device profile knows the memory of.",
    "No device profile knows the memory of {device!r}.",
    "Write one of {known:list}, or its memory as --memory-gib.",
)

TwoMemorySizes = NxdtError.define(
    "NXDT-P008",
    "Both ways to say how much memory a device has.",
    "--device and --memory-gib both say how much memory a device has.",
    "Give one of them.",
)

NoTimesOfDevice = NxdtError.define(
    "NXDT-P009",
    "A search ranks layouts by time, which needs figures that are not known for the product.",
    "The time of a step on {device} in {dtype} cannot be estimated: its peak or its links are not known.",
    "Search for a product whose figures are known, such as --device H100, or compare the memory of layouts with "
    "nxdt plan --device {device}, one at a time.",
)

NoLayoutFits = NxdtError.define(
    "NXDT-P010",
    "Every layout of a search needs more memory than a device has.",
    "None of {tried} layouts leaves a tenth of the memory of {device} free.",
    "Give the run more devices (--world-size), make data.micro_batch_size or data.seq_length smaller, or choose "
    "a precision with smaller state.",
)

EngineCannotCompileAhead = NxdtError.define(
    "NXDT-P100",
    "``nxdt compile`` with an engine that fills no cache of compiled graphs.",
    "The parallel engine {engine!r} of {dist} cannot compile ahead of a run.",
    "Start the run itself: `nxdt train` compiles what the engine compiles at its first step.",
)

CompileIsOff = NxdtError.define(
    "NXDT-P101",
    "``nxdt compile`` of a run that compiles nothing.",
    "model.compile is false, so the parallel engine {engine!r} compiles nothing in this run.",
    "Set model.compile=true, for `nxdt train` too; or run `nxdt train` without compiling ahead.",
)

CompileCacheNotWritable = NxdtError.define(
    "NXDT-P102",
    "The folder for compiled graphs cannot be written.",
    "Compiled graphs cannot be kept in {path}: {reason}.",
    "Let {setting} name a folder that this user may write.",
)

CompileCacheNotAFolder = NxdtError.define(
    "NXDT-P103",
    "An address for compiled graphs that the engine cannot use.",
    "compiler_cache_url is {address!r}, and the parallel engine {engine!r} keeps compiled graphs in a folder.",
    "Write a path, such as one on a file system that all nodes share, or file:///absolute/path.",
)
