"""Errors of devices, layouts, launch and jobs for clusters: codes ``NXDT-P…``."""

from __future__ import annotations

from typing import Any

from nxdt_core.errors.base import NxdtError

UnknownAccelerator = NxdtError.define(
    "NXDT-P001",
    "A device type that no profile describes.",
    "There is no device type {accelerator!r} (trainer.accelerator).",
    "Write one of {known:list}, or auto.",
    example={"accelerator": "gpu", "known": ("cpu", "cuda", "neuron")},
)

AcceleratorMissing = NxdtError.define(
    "NXDT-P002",
    "A device type that this machine, or this build of torch, does not have.",
    "trainer.accelerator is {accelerator!r}, and torch finds only {found!r} here.",
    "Install {install}, and the driver, or set trainer.accelerator=auto. 'nxdt env' shows what this machine has.",
    example={
        "accelerator": "cuda",
        "found": "cpu",
        "install": "a build of torch for the version of CUDA that the driver has",
    },
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

LaunchersDisagree = NxdtError.define(
    "NXDT-P110",
    "Variables of one or two launchers that contradict each other.",
    "The environment contradicts itself: {contradiction}.",
    "Let one launcher set these variables and unset those that another program or a job script left; "
    "NXDT_LAUNCHER={launcher} takes those of one launcher alone.",
)

NotStartedByLauncher = NxdtError.define(
    "NXDT-P111",
    "``NXDT_LAUNCHER`` names a launcher that did not start this process.",
    "NXDT_LAUNCHER is {launcher!r}, and the environment has no variables of that launcher.",
    "Start the command through that launcher, or unset NXDT_LAUNCHER.",
)

CannotSubmit = NxdtError.define(
    "NXDT-P112",
    "``nxdt launch`` with a launcher that only joins processes and submits no jobs.",
    "The launcher {launcher!r} joins processes that something else has started, and submits no jobs.",
    "Choose a launcher that `nxdt launch --help` lists, or start the processes yourself.",
)

ClusterHasOtherDevices = NxdtError.define(
    "NXDT-P113",
    "A cluster whose nodes have another number of devices than the run uses on each.",
    "{source} says {found} devices for each node, and trainer.devices is {wanted}.",
    "Set trainer.devices={found} (and the layout with it), or correct the number of devices: {advice}",
    also=lambda error: {
        "advice": "devices that no process uses are paid for."
        if error.found > error.wanted
        else "a process cannot have less than one device."
    },
)

ClusterHasOtherNodes = NxdtError.define(
    "NXDT-P114",
    "A cluster file with another number of nodes than the run uses.",
    "The cluster file {path} says {found} nodes, and --nodes is {wanted}.",
    "Set one of them to the other number, or leave one out.",
)

LauncherNeedsOption = NxdtError.define(
    "NXDT-P115",
    "An option that a launcher cannot do without.",
    "The launcher {launcher!r} needs {option}: {reason}.",
    "Give --{flag}=…, or write {option}: … into the cluster file of --cluster.",
    also=lambda error: {"flag": error.option.replace("_", "-")},
)

JobFileExists = NxdtError.define(
    "NXDT-P116",
    "A file of a job that would be replaced by another one.",
    "{path} exists and is another file than the one that would be written.",
    "Write to another directory with --output, or replace it with --force.",
)

JobFileUnwritable = NxdtError.define(
    "NXDT-P117",
    "A directory for the files of a job that cannot be written.",
    "{path} cannot be written: {reason}.",
    "Name a directory on the shared file system that this user may write with --output.",
)

SubmitCommandMissing = NxdtError.define(
    "NXDT-P118",
    "The scheduler's program is not installed here.",
    "{program} is not on this machine's PATH, so the job was not submitted; its files are written.",
    "Run this where the scheduler's programs are installed: cd {directory} && {command}",
)

SubmitFailed = NxdtError.define(
    "NXDT-P119",
    "The scheduler refused a job.",
    "{command} ended with status {status}: {output}",
    "Correct what it says in the options or the cluster file, and submit again; the files are in {directory}.",
    exit_status=1,
)

SecretsInJobFiles = NxdtError.define(
    "NXDT-P120",
    "A configuration with literal secrets that would have to be written into the files of a job.",
    "The job's files contain the configuration, and these keys hold secrets: {keys:list}.",
    "Write a reference such as ${{oc.env:NAME}} in the configuration, and set NAME where the job runs.",
)

RestartsNeedResume = NxdtError.define(
    "NXDT-P121",
    "``--max-restarts`` of a run that would begin again at step 0.",
    "--max-restarts is {restarts}, and checkpoint.resume_if_exists is false: a restart would not resume.",
    "Set checkpoint.resume_if_exists=true checkpoint.resume_ignore_no_checkpoint=true, or leave it out.",
)

NodeAlreadyJoined = NxdtError.define(
    "NXDT-P122",
    "Two launchers with the same node number.",
    "Another launcher has already joined as node {number} at {address}:{port}.",
    "Give each node another NODE_RANK. After a restart of this node alone, wait until the launcher on node 0 has "
    "noticed the loss.",
)
