"""Settings that are accepted and do nothing, or are about to go: one line for each reason.

Such a setting is not an error: a file may run on fewer devices than it was written for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from nxdt_core.config.annotations import Deprecated
from nxdt_core.config.checks import BATCH, CP, EP, PP, REPLICAS, TP, VPP, WORLD, Checked, mesh_sizes, micro_batches
from nxdt_core.config.schema import Composition, RunConfig
from nxdt_core.config.section import keys_of
from nxdt_core.config.training_schema import EarlyStoppingParams, EmaConfig
from nxdt_core.config.tree import join
from nxdt_core.deprecation import deprecation_text

__all__ = ["find_notes"]

_STRATEGY, _SCHEDULE, _MANAGER = "distributed_strategy", "model.optim.sched", "exp_manager"
_SP, _REGATHER = f"{_STRATEGY}.sequence_parallel", f"{_STRATEGY}.sequence_parallel_regather"
_KV_REPLICATOR = f"{_STRATEGY}.kv_replicator"
_GRANULARITY, _RECOMPUTE = "model.activations_checkpoint_granularity", "model.activations_checkpoint_recompute"
_HORIZON, _LAST = f"{_SCHEDULE}.max_steps", "trainer.max_steps"

_READ_ABOVE_ONE: dict[str, tuple[str, ...]] = {
    TP: (_SP, _REGATHER, f"{_STRATEGY}.async_tensor_parallel", f"{_STRATEGY}.pad_heads", _KV_REPLICATOR),
    PP: (VPP, f"{_STRATEGY}.pipeline_schedule", "model.pipeline_cuts"),
    CP: (f"{_STRATEGY}.context_parallel_method",),
    EP: ("model.moe.exchange_chunks",),
}
"""Size of a dimension → settings that only a size above 1 reads."""
_SWITCHED = {
    f"{_MANAGER}.ema.enable": (f"{_MANAGER}.ema", EmaConfig),
    f"{_MANAGER}.create_early_stopping_callback": (f"{_MANAGER}.early_stopping_callback_params", EarlyStoppingParams),
}
"""Switch → the section that nothing reads while it is off."""


def find_notes(checked: Checked, composition: Composition) -> Iterator[str]:
    """Yield the lines that name keys without an effect, and those that are deprecated."""
    given, engine = checked.values.get, composition.components.get("engine")
    yield from _deprecated(RunConfig, "", checked)
    for section, cls in composition.classes.items():
        yield from _deprecated(cls, section, checked)
    xla = engine is not None and "xla" in engine.record.capabilities
    if engine is not None and not xla and given("trainer.lnc") is not None:
        yield f"trainer.lnc: no effect, since the engine {engine.record.name!r} does not read it"
    if not xla and given("compiler_cache_url") is not None and not given("model.compile"):
        yield "compiler_cache_url: no effect, since model.compile is false"
    for switch, (section, cls) in _SWITCHED.items():
        if not given(switch):
            defaults = {join(section, name): key.default for name, key in keys_of(cls).items()}
            changed = [path for path, default in defaults.items() if given(path, default) != default]
            yield from _idle(changed, f"{switch} is not set")
    yield from _of_dimensions(checked)
    yield from _of_sharding(checked)
    if given(_RECOMPUTE) and given(_GRANULARITY, "") is None:
        yield from _idle([_RECOMPUTE], f"{_GRANULARITY} is not set")
    yield from _waiting_stages(checked)
    ends = getattr(composition.classes.get(_SCHEDULE), "reads_max_steps", True)
    yield from _of_the_schedule(checked, ends=ends)


def _deprecated(cls: type, path: str, checked: Checked) -> Iterator[str]:
    """Keys of a section's class that are set and go."""
    for name, key in keys_of(cls).items():
        where = join(path, name)
        node, mark = checked.tree.find(where), key.mark(Deprecated)
        if node is not None and key.section is not None and isinstance(node.value, dict):
            yield from _deprecated(key.section, where, checked)
        elif node is not None and mark is not None and node.origin.kind != "default":
            yield deprecation_text(where, use=mark.use, goes=mark.goes)


def _of_dimensions(checked: Checked) -> Iterator[str]:
    given = checked.values.get
    for size, keys in _READ_ABOVE_ONE.items():
        if given(size) == 1:
            asked = [key for key in keys if (found := given(key)) is True or (found and found != 1)]
            yield from _idle(asked, f"{size} is 1")
    numbers = checked.numbers("model.num_kv_heads", TP, _KV_REPLICATOR)
    if numbers is not None and numbers[1] > 1 and numbers[2] > (needed := max(1, numbers[1] // numbers[0])):
        made = "no copies" if needed == 1 else f"{needed} copies"
        yield f"{_KV_REPLICATOR}: {made} are made, since {TP} is {numbers[1]} and model.num_kv_heads {numbers[0]}"
    if given(_REGATHER) and given(TP) != 1 and not given(_SP):
        yield from _idle([_REGATHER], f"{_SP} is false")
    elif given(_REGATHER) and given(TP) != 1 and given(_GRANULARITY) == "full":
        yield from _idle([_REGATHER], f"{_GRANULARITY} is full, and layers that are recomputed gather again")


def _of_sharding(checked: Checked) -> Iterator[str]:
    """Yield notes on ZeRO without ranks to shard over, and on tokens exchanged for experts that are never full."""
    sizes, zero = mesh_sizes(checked), f"{_STRATEGY}.zero1"
    written = [key for key in (zero, f"{_STRATEGY}.zero_stage") if checked.origin(key).kind != "default"]
    asked = [key for key in written if checked.values.get(key)]
    if checked.numbers(*WORLD) == (1, 1):
        yield from _idle(asked, "one process has nothing to shard")
    elif sizes is not None and sizes.fsdp == 1:
        yield from _idle(asked, "the layout leaves no data parallel ranks to shard over")
    if sizes is not None and sizes.zero_stage == 0 and sizes.dp_replicate > 1:
        yield from _idle([REPLICAS], f"{zero} is false and every data parallel rank holds a whole copy")
    shuffle, factor = f"{_STRATEGY}.token_shuffle_group_size", "model.moe.capacity_factor"
    numbers = checked.numbers(shuffle, "model.moe.num_experts")
    if numbers is not None and numbers[0] != 1 and (checked.values.get(factor) or 0) <= 0:
        yield f"{shuffle}: tokens travel for nothing, since {factor} bounds no expert"


def _waiting_stages(checked: Checked) -> Iterator[str]:
    """Schedules that run with few micro-batches and then mostly wait; others are refused."""
    sizes, count = mesh_sizes(checked), micro_batches(checked)
    if sizes is None or count is None or sizes.pp == 1:
        return
    enough = 2 * sizes.pp - 1 if sizes.schedule == "zbv" else sizes.pp
    if count < enough:
        yield (
            f"{BATCH}: the schedule {sizes.schedule} over {sizes.pp} pipeline ranks is idle for longer than it need be"
            f" with {count} micro-batches per step; {enough} fill it"
        )


def _of_the_schedule(checked: Checked, *, ends: bool) -> Iterator[str]:
    """A warm-up that is not over at the end, and a schedule that is longer or shorter than the run.

    Args:
        checked: the values.
        ends: whether the schedule reads its ``max_steps``.
    """
    lengths = checked.numbers(_HORIZON, _LAST)
    if lengths is None:
        return
    horizon, last = lengths
    end, steps = (_HORIZON, horizon) if ends and horizon <= last else (_LAST, last)
    warmup = checked.numbers(f"{_SCHEDULE}.warmup_steps")
    if warmup is not None and 0 < steps <= warmup[0]:
        yield (
            f"{_SCHEDULE}.warmup_steps: the rate only rises, since {end} is {steps} and warm-up takes {warmup[0]} steps"
        )
    if not ends and horizon != last:
        yield from _idle([_HORIZON], f"the schedule {checked.values.get(f'{_SCHEDULE}.name')} does not read it")
    elif horizon > last:
        yield f"{_HORIZON}: the schedule ends at step {horizon}, but the run ends earlier: {_LAST} is {last}"
    elif horizon < last:
        floor = checked.numbers(f"{_SCHEDULE}.min_lr")
        rate = "" if floor is None else f"; the learning rate then stays at min_lr, {floor[0]:g}"
        yield f"{_HORIZON}: the schedule ends at step {horizon}, but the run ends later: {_LAST} is {last}{rate}"


def _idle(keys: Iterable[str], reason: str) -> Iterator[str]:
    if named := ", ".join(keys):
        yield f"{named}: no effect, since {reason}"
