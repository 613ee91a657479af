"""Rules over values that are each right: what cannot work together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from nxdt_core.api import ModelComponent
from nxdt_core.config.annotations import FORMS, PartOf, seconds_of
from nxdt_core.config.schema import Composition
from nxdt_core.config.secrets import describe_node
from nxdt_core.config.section import keys_of
from nxdt_core.config.training_schema import DistributedStrategyConfig
from nxdt_core.config.tree import Node, Origin, Place, join
from nxdt_core.errors.configuration import ConfigProblem, ImpossibleCombination, Misfit, WrongValue
from nxdt_core.errors.launch import WorldDoesNotDivide
from nxdt_core.protocols.parallel.mesh import MeshSizes
from nxdt_core.protocols.parallel.rules import Settings

__all__ = [
    "BATCH",
    "CP",
    "ENDING_RULES",
    "EP",
    "LAYOUT_RULES",
    "MICRO_BATCH",
    "PP",
    "REPLICAS",
    "RULES",
    "TP",
    "VPP",
    "WORLD",
    "Checked",
    "find_impossible",
    "find_overfull_curve",
    "find_unknown_recompute",
    "find_wrong_durations",
    "mesh_sizes",
    "micro_batches",
]


@dataclass(frozen=True, slots=True)
class Checked:
    """The values that were read; a wrong one is absent, and rules that need it keep silent."""

    values: Mapping[str, Any]
    tree: Node

    def numbers(self, *keys: str) -> tuple[int, ...] | None:
        """Return the values of ``keys``, or None where one of them is absent, ``null`` or no number."""
        found = [self.values.get(key) for key in keys]
        if any(type(value) not in (int, float) for value in found):
            return None
        return tuple(value for value in found if value is not None)

    def origin(self, key: str) -> Origin:
        """Return where the value of ``key`` comes from."""
        node = self.tree.find(key)
        return node.origin if node is not None else self.tree.origin

    def place(self, *keys: str) -> Place:
        """Return the place of a problem between ``keys``: the first that is written, by default the first."""
        key = next((key for key in keys if self.origin(key).kind != "default"), keys[0])
        return self.origin(key).at(key)


_SECTION = "distributed_strategy"
TP = f"{_SECTION}.tensor_model_parallel_size"
PP = f"{_SECTION}.pipeline_model_parallel_size"
VPP = f"{_SECTION}.virtual_pipeline_model_parallel_size"
CP = f"{_SECTION}.context_parallel_size"
EP = f"{_SECTION}.expert_model_parallel_size"
REPLICAS = f"{_SECTION}.dp_replicate"
WORLD = ("trainer.devices", "trainer.num_nodes")
BATCH, MICRO_BATCH = "data.global_batch_size", "data.micro_batch_size"


def mesh_sizes(settings: Settings) -> MeshSizes | None:
    """Return the size of every dimension; None where they do not fit the processes or one is wrong."""
    world = settings.numbers(*WORLD)
    names = list(keys_of(DistributedStrategyConfig))
    if world is None or any(f"{_SECTION}.{name}" not in settings.values for name in names):
        return None
    strategy = DistributedStrategyConfig(**{name: settings.values[f"{_SECTION}.{name}"] for name in names})
    try:
        return strategy.mesh_sizes(world[0] * world[1])
    except WorldDoesNotDivide:
        return None


def micro_batches(settings: Settings) -> int | None:
    """Return the micro-batches of one step on each data parallel rank; None where the batch does not divide."""
    batch, sizes = settings.numbers(BATCH, MICRO_BATCH), mesh_sizes(settings)
    if batch is None or sizes is None:
        return None
    count, rest = divmod(batch[0], batch[1] * sizes.dp)
    return None if rest else count


_STOPPING = "exp_manager.create_early_stopping_callback"
_LOCAL, _GLOBAL = "exp_manager.log_local_rank_0_only", "exp_manager.log_global_rank_0_only"
_BY_STEPS, _BY_PASSES = "trainer.val_check_interval", "trainer.check_val_every_n_epoch"
_SAVE_BY_STEPS = "checkpoint.every_n_train_steps"
_SAVE_BY_PASSES = "checkpoint.every_n_epochs"


def early_stopping_validates(checked: Checked) -> Iterator[ImpossibleCombination]:
    """Yield a problem where early stopping is on and nothing is validated."""
    never = all(checked.values.get(key, "") is None for key in (_BY_STEPS, _BY_PASSES))
    if checked.values.get(_STOPPING) and never:
        yield ImpossibleCombination(
            **checked.place(_STOPPING, _BY_STEPS),
            reason="early stopping judges after each validation, and the run has none",
            advice=f"Set {_BY_STEPS}.",
        )


def one_interval(checked: Checked) -> Iterator[ImpossibleCombination]:
    """Yield a problem where an interval is given both in steps and in passes."""
    for steps, passes in ((_BY_STEPS, _BY_PASSES), (_SAVE_BY_STEPS, _SAVE_BY_PASSES)):
        if checked.values.get(passes) and checked.values.get(steps):
            yield ImpossibleCombination(
                **checked.place(passes, steps),
                reason=f"it counts passes over the data, and {steps} counts steps",
                advice="Set one of them to null.",
            )


def some_training(checked: Checked) -> Iterator[ImpossibleCombination]:
    """No pass, or no batch."""
    for key, advice in (
        ("trainer.max_epochs", "-1 leaves the end to trainer.max_steps."),
        ("trainer.limit_train_batches", "null takes all."),
    ):
        if checked.values.get(key) == 0:
            yield ImpossibleCombination(**checked.place(key), reason="0 trains nothing", advice=advice)


def one_kind_of_log(checked: Checked) -> Iterator[ImpossibleCombination]:
    """Yield one rank of each node, or one of all."""
    if checked.values.get(_LOCAL) and checked.values.get(_GLOBAL):
        yield ImpossibleCombination(
            **checked.place(_LOCAL, _GLOBAL),
            reason=f"it wants a log of each node, and {_GLOBAL} one of the run",
            advice="Keep one of them.",
        )


ENDING_RULES = (early_stopping_validates, one_interval, some_training, one_kind_of_log)


def world_divides(checked: Checked) -> Iterator[ImpossibleCombination]:
    """Yield a number of processes that does not fill whole copies of the model."""
    numbers = checked.numbers(*WORLD, TP, PP, CP)
    if numbers is None:
        return
    devices, nodes, tp, pp, cp = numbers
    if devices * nodes % (tp * pp * cp):
        groups, rest = divmod(devices * nodes, pp * cp)
        name = "trainer.devices x trainer.num_nodes" + (" / (PP x CP)" if pp * cp > 1 else "")
        yield ImpossibleCombination(
            **checked.place(*WORLD, TP, PP, CP),
            reason=f"{nodes} x {devices} processes do not divide into groups of TP {tp} x PP {pp} x CP {cp}",
            advice=f"Make trainer.devices x trainer.num_nodes a multiple of {tp * pp * cp}.",
            cause=None if rest else Misfit(of=TP, divisor=tp, place=checked.place(TP), name=name, number=groups),
        )


def replicas_divide(checked: Checked) -> Iterator[ImpossibleCombination]:
    """Data parallel ranks fall into equal groups, and expert parallel ranks fill such a group."""
    numbers = checked.numbers(*WORLD, TP, PP, CP, REPLICAS, EP)
    if numbers is None:
        return
    devices, nodes, tp, pp, cp, replicas, ep = numbers
    dp, rest = divmod(devices * nodes, tp * pp * cp)
    if rest:
        return
    if dp % replicas:
        yield ImpossibleCombination(
            **checked.place(REPLICAS, *WORLD),
            reason=f"{dp} data parallel ranks do not divide into {replicas} groups",
            advice=f"Choose a divisor of {dp}.",
        )
    elif dp // replicas * cp % ep:
        shards = dp // replicas * cp
        yield ImpossibleCombination(
            **checked.place(EP, REPLICAS, CP, *WORLD),
            reason=f"expert parallelism borrows from {shards} data and context parallel ranks, which EP {ep} does not"
            " divide",
            advice=f"Choose a divisor of {shards}.",
        )


def batch_divides(checked: Checked) -> Iterator[ImpossibleCombination]:
    """Yield a global batch that is not a whole number of micro-batches on each data parallel rank."""
    numbers, sizes = checked.numbers(BATCH, MICRO_BATCH), mesh_sizes(checked)
    if numbers is None or sizes is None:
        return
    whole, micro = numbers
    if whole % (micro * sizes.dp):
        yield ImpossibleCombination(
            **checked.place(BATCH, MICRO_BATCH),
            reason=f"{whole} does not divide by data.micro_batch_size {micro} x {sizes.dp} data parallel ranks",
            advice=f"Write a multiple of {micro * sizes.dp}.",
        )


LAYOUT_RULES = (
    world_divides,
    replicas_divide,
    batch_divides,
)
"""In the order in which they are tried."""


Rule = Callable[[Checked], Iterable[ImpossibleCombination]]

_ZERO, _ZERO_STAGE = "distributed_strategy.zero1", "distributed_strategy.zero_stage"
_MASTERS = "checkpoint.use_master_weights_in_ckpt"
_GRANULARITY = "model.activations_checkpoint_granularity"
_RECOMPUTE = "model.activations_checkpoint_recompute"


def find_impossible(checked: Checked) -> Iterator[ImpossibleCombination]:
    """Yield the problems that all rules about combinations of keys find."""
    for rule in RULES:
        yield from rule(checked)


def zero_stage_agrees(checked: Checked) -> Iterator[ImpossibleCombination]:
    """``zero1: false`` switches sharding off, ``zero_stage`` switches it on."""
    stage = checked.values.get(_ZERO_STAGE)
    if stage is not None and checked.values.get(_ZERO) is False:
        yield ImpossibleCombination(
            **checked.place(_ZERO_STAGE, _ZERO),
            reason=f"zero_stage {stage} shards, and zero1: false says not to",
            advice="Leave zero1 out, or set zero_stage to null.",
        )


def resume_named(checked: Checked) -> Iterator[ImpossibleCombination]:
    """``weight_init_only`` takes weights from somewhere."""
    if checked.values.get("checkpoint.weight_init_only") and checked.values.get("checkpoint.resume_from", "") is None:
        yield ImpossibleCombination(
            **checked.place("checkpoint.weight_init_only"),
            reason="weight_init_only takes the weights of a checkpoint, and checkpoint.resume_from names none",
            advice="Set checkpoint.resume_from.",
        )


def one_form_of_weights(checked: Checked) -> Iterator[ImpossibleCombination]:
    """``use_master_weights_in_ckpt: true`` wants float32 as the model's weights."""
    rounded = "checkpoint.save_bf16"
    if checked.values.get(_MASTERS) and checked.values.get(rounded):
        yield ImpossibleCombination(
            **checked.place(_MASTERS, rounded),
            reason=f"it wants float32 as the model's weights, and {rounded}: true wants bfloat16",
            advice="Keep one of them; a resume is exact with either.",
        )


def one_dtype_of_state(checked: Checked) -> Iterator[ImpossibleCombination]:
    """``adamw_fp32OptState`` is AdamW with float32 state."""
    narrow, optimizer = "precision.optimizer_state", "model.optim.name"
    if checked.values.get(narrow) == "bfloat16" and checked.values.get(optimizer) == "adamw_fp32OptState":
        yield ImpossibleCombination(
            **checked.place(narrow, optimizer),
            reason=f"it says bfloat16, and {optimizer}: adamw_fp32OptState says float32",
            advice=f"Set {optimizer} to adamw, or {narrow} to float32.",
        )


def recompute_named(checked: Checked) -> Iterator[ImpossibleCombination]:
    """Yield modules to recompute that are named under another granularity than ``selective``."""
    granularity, names = checked.values.get(_GRANULARITY), checked.values.get(_RECOMPUTE)
    if names and granularity == "full":
        yield ImpossibleCombination(
            **checked.place(_RECOMPUTE),
            reason="whole layers are recomputed under granularity 'full', so naming modules means nothing",
            advice=f"Set {_GRANULARITY} to selective, or leave the names out.",
        )
    if not names and granularity == "selective":
        yield ImpossibleCombination(
            **checked.place(_GRANULARITY, _RECOMPUTE),
            reason=f"selective recomputes what {_RECOMPUTE} names, and that names nothing",
            advice=f"Name modules there, such as CoreAttention, or set {_GRANULARITY} to full.",
        )


def rate_falls(checked: Checked) -> Iterator[ImpossibleCombination]:
    """Yield a ``min_lr`` that is not below the peak learning rate."""
    floor, rate = "model.optim.sched.min_lr", "model.optim.lr"
    rates = checked.numbers(floor, rate)
    if rates is not None and rates[0] > rates[1]:
        yield ImpossibleCombination(
            **checked.place(floor, rate),
            reason=f"min_lr {rates[0]} is above the learning rate {rates[1]} ({rate}) that falls to it",
            advice=f"Lower {floor} or raise {rate}.",
        )


def sequence_has_positions(checked: Checked) -> Iterator[ImpossibleCombination]:
    """Yield a model with a declared number of positions takes no longer sequence."""
    length, longest = "data.seq_length", "model.max_position_embeddings"
    sizes = checked.numbers(length, longest)
    if sizes is not None and sizes[0] > sizes[1]:
        yield ImpossibleCombination(
            **checked.place(length, longest),
            reason=f"sequences have {sizes[0]} tokens, the model has positions for {sizes[1]} ({longest})",
            advice=f"Shorten {length} or raise {longest}.",
        )


def metrics_file_collected(checked: Checked) -> Iterator[ImpossibleCombination]:
    """Yield a file of metrics that node_exporter would pass over."""
    key = "exp_manager.monitoring.metrics_file"
    name = checked.values.get(key)
    if isinstance(name, str) and not name.endswith(".prom"):
        yield ImpossibleCombination(
            **checked.place(key),
            reason="node_exporter reads files whose name ends with .prom",
            advice="Name it so, such as nxdt.prom.",
        )


RULES: tuple[Rule, ...] = (
    *ENDING_RULES,
    *LAYOUT_RULES,
    zero_stage_agrees,
    resume_named,
    one_form_of_weights,
    one_dtype_of_state,
    recompute_named,
    rate_falls,
    sequence_has_positions,
    metrics_file_collected,
)
"""In the order in which they are tried."""


_KEYS = ("checkpoint.train_time_interval", "trainer.max_time")


def find_wrong_durations(checked: Checked) -> Iterator[ConfigProblem]:
    """Yield the values that :func:`nxdt_core.config.fields.duration.seconds_of` does not read."""
    for key in _KEYS:
        value = checked.values.get(key)
        if value is None:
            continue
        try:
            seconds_of(value)
        except ValueError:
            node = checked.tree.find(key)
            assert node is not None  # it has a value
            yield WrongValue(**checked.place(key), found=describe_node(node), allowed=FORMS)


def find_unknown_recompute(checked: Checked, composition: Composition) -> Iterator[ConfigProblem]:
    """Report names that the model lacks, where its record lists the names that it has."""
    model = composition.components.get("model")
    known = model.record.recompute_names if model is not None and isinstance(model.record, ModelComponent) else None
    if known is None or model is None or checked.values.get(_GRANULARITY) != "selective":
        return
    for name in checked.values.get(_RECOMPUTE) or ():
        if name not in known:
            near = get_close_matches(name, known, n=1)
            yield WrongValue(
                **checked.place(_RECOMPUTE),
                found=f"{name!r}, which model {model.record.name!r} does not have",
                allowed=", ".join(known),
                hint=f"Did you mean {near[0]!r}?" if near else "",
            )


_SCHEDULE = "model.optim.sched"
_WARMUP, _HORIZON = f"{_SCHEDULE}.warmup_steps", f"{_SCHEDULE}.max_steps"


def find_overfull_curve(checked: Checked, instances: Mapping[str, object]) -> Iterator[ImpossibleCombination]:
    """Yield the steps at a constant rate or of decay that begin before the warm-up is done, or even before the first
    step.

    The rate would jump, or fall from less than its peak. A warm-up alone may be longer: such a run is the beginning
    of a longer one, and a note says so.
    """
    if _SCHEDULE not in instances:
        return
    cls: type = type(instances[_SCHEDULE])
    keys = keys_of(cls)
    marked = [join(_SCHEDULE, name) for name, key in keys.items() if _part(key.mark(PartOf))]
    parts = {path: count for path in marked if (count := checked.values.get(path))}
    horizon = checked.numbers(_HORIZON)
    if not parts or horizon is None:
        return
    if warmup := checked.values.get(_WARMUP):
        parts = {_WARMUP: warmup, **parts}
    total = sum(parts.values())
    if total > horizon[0]:
        said = " and ".join(f"{path.rpartition('.')[2]} {count}" for path, count in parts.items())
        yield ImpossibleCombination(
            **checked.place(*reversed(parts), _HORIZON),
            reason=f"{said} {'are' if len(parts) > 1 else 'is'} more than the {horizon[0]} steps of the schedule",
            advice=f"Shorten them, or set {_HORIZON} to at least {total}: a run may end before its schedule does.",
        )


def _part(mark: PartOf | None) -> bool:
    return mark is not None and mark.key == _HORIZON
