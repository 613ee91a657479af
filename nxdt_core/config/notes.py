"""Settings that are accepted and do nothing, or are about to go: one line for each reason."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from nxdt_core.config.annotations import Deprecated
from nxdt_core.config.checks import BATCH, CP, EP, PP, REPLICAS, TP, VPP, WORLD, Checked, mesh_sizes, micro_batches
from nxdt_core.config.schema import Composition, RunConfig
from nxdt_core.config.section import Key, keys_of
from nxdt_core.config.training_schema import EarlyStoppingParams, EmaConfig
from nxdt_core.config.tree import join
from nxdt_core.deprecation import deprecation_text

__all__ = ["find_idle", "find_notes"]

_STRATEGY = "distributed_strategy"
_ZERO, _ZERO_STAGE = f"{_STRATEGY}.zero1", f"{_STRATEGY}.zero_stage"
_KV_HEADS, _KV_REPLICATOR = "model.num_kv_heads", f"{_STRATEGY}.kv_replicator"
_GRANULARITY = "model.activations_checkpoint_granularity"
_RECOMPUTE = "model.activations_checkpoint_recompute"
_SCHEDULE = "model.optim.sched"
_SHUFFLE, _EXPERTS = f"{_STRATEGY}.token_shuffle_group_size", "model.moe.num_experts"
_FACTOR = "model.moe.capacity_factor"
_WARMUP, _HORIZON, _LAST = f"{_SCHEDULE}.warmup_steps", f"{_SCHEDULE}.max_steps", "trainer.max_steps"

_SP, _REGATHER = f"{_STRATEGY}.sequence_parallel", f"{_STRATEGY}.sequence_parallel_regather"

_READ_ABOVE_ONE: dict[str, tuple[str, ...]] = {
    TP: (_SP, _REGATHER, f"{_STRATEGY}.async_tensor_parallel", f"{_STRATEGY}.pad_heads", _KV_REPLICATOR),
    PP: (VPP, f"{_STRATEGY}.pipeline_schedule", "model.pipeline_cuts"),
    CP: (f"{_STRATEGY}.context_parallel_method",),
    EP: ("model.moe.exchange_chunks",),
}
"""Size of a dimension → settings that only a size above 1 reads."""


def find_idle(checked: Checked, classes: Mapping[str, type]) -> Iterator[str]:
    """Yield a line for each reason that makes settings idle; ``classes`` are those of the components' sections."""
    manager = "exp_manager"
    yield from _switched_off(checked, f"{manager}.ema.enable", f"{manager}.ema", EmaConfig)
    stopping = f"{manager}.create_early_stopping_callback"
    yield from _switched_off(checked, stopping, f"{manager}.early_stopping_callback_params", EarlyStoppingParams)
    for size, keys in _READ_ABOVE_ONE.items():
        if checked.values.get(size) == 1:
            yield from _lines([key for key in keys if _asks(checked, key)], f"{size} is 1")
    yield from _copies(checked)
    yield from _regather(checked)
    yield from _zero(checked)
    yield from _shuffle(checked)
    if checked.values.get(_RECOMPUTE) and checked.values.get(_GRANULARITY, "") is None:
        yield from _lines([_RECOMPUTE], f"{_GRANULARITY} is not set")
    yield from _waiting_stages(checked)
    ends = getattr(classes.get(_SCHEDULE), "reads_max_steps", True)
    yield from _warmup(checked, ends=ends)
    yield from _other_end(checked) if ends else _endless(checked)


def _switched_off(checked: Checked, switch: str, section: str, cls: type) -> Iterator[str]:
    """What a section sets that ``switch`` leaves off."""
    if not checked.values.get(switch):
        defaults = {join(section, name): key.default for name, key in keys_of(cls).items()}
        changed = [path for path, default in defaults.items() if checked.values.get(path, default) != default]
        yield from _lines(changed, f"{switch} is not set")


def _copies(checked: Checked) -> Iterator[str]:
    """Copies of key and value heads that are not needed."""
    numbers = checked.numbers(_KV_HEADS, TP, _KV_REPLICATOR)
    if numbers is None:
        return
    heads, tp, copies = numbers
    needed = max(1, tp // heads)
    if tp > 1 and copies > needed:
        made = "no copies" if needed == 1 else f"{needed} copies"
        yield f"{_KV_REPLICATOR}: {made} are made, since {TP} is {tp} and {_KV_HEADS} {heads}"


def _regather(checked: Checked) -> Iterator[str]:
    """What is gathered anyway, or not at all; with one tensor parallel rank the notes of that say it."""
    if not checked.values.get(_REGATHER) or checked.values.get(TP) == 1:
        return
    if not checked.values.get(_SP):
        yield from _lines([_REGATHER], f"{_SP} is false")
    elif checked.values.get(_GRANULARITY) == "full":
        yield from _lines([_REGATHER], f"{_GRANULARITY} is full, and layers that are recomputed gather again")


def _zero(checked: Checked) -> Iterator[str]:
    processes, sizes = checked.numbers(*WORLD), mesh_sizes(checked)
    written = [key for key in (_ZERO, _ZERO_STAGE) if checked.origin(key).kind != "default" and checked.values.get(key)]
    if processes == (1, 1):
        yield from _lines(written, "one process has nothing to shard")
    elif sizes is not None and sizes.fsdp == 1:
        yield from _lines(written, "the layout leaves no data parallel ranks to shard over")
    if sizes is not None and sizes.zero_stage == 0 and sizes.dp_replicate > 1:
        yield from _lines([REPLICAS], f"{_ZERO} is false and every data parallel rank holds a whole copy")


def _shuffle(checked: Checked) -> Iterator[str]:
    """Tokens that travel although no expert is ever full."""
    numbers = checked.numbers(_SHUFFLE)
    if numbers is None or numbers[0] == 1 or checked.numbers(_EXPERTS) is None:
        return
    factor = checked.values.get(_FACTOR)
    if factor is None or factor <= 0:
        yield f"{_SHUFFLE}: tokens travel for nothing, since {_FACTOR} bounds no expert"


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


def _warmup(checked: Checked, *, ends: bool) -> Iterator[str]:
    """Yield a note of a warm-up that is not over when the schedule or the run ends, whichever is first."""
    found = checked.numbers(_WARMUP, _HORIZON, _LAST)
    if found is None:
        return
    warmup, horizon, last = found
    end = _HORIZON if ends and horizon <= last else _LAST
    steps = horizon if end == _HORIZON else last
    if 0 < steps <= warmup:
        yield f"{_WARMUP}: the rate only rises, since {end} is {steps} and warm-up takes {warmup} steps"


def _other_end(checked: Checked) -> Iterator[str]:
    """Yield a note of a schedule that is longer or shorter than the run."""
    steps = checked.numbers(_HORIZON, _LAST)
    if steps is None or steps[0] == steps[1]:
        return
    horizon, last = steps
    if horizon > last:
        yield f"{_HORIZON}: the schedule ends at step {horizon}, but the run ends earlier: {_LAST} is {last}"
        return
    floor = checked.numbers(f"{_SCHEDULE}.min_lr")
    rate = "" if floor is None else f"; the learning rate then stays at min_lr, {floor[0]:g}"
    yield f"{_HORIZON}: the schedule ends at step {horizon}, but the run ends later: {_LAST} is {last}{rate}"


def _endless(checked: Checked) -> Iterator[str]:
    """Yield a note of a length that is set for a schedule without an end."""
    steps = checked.numbers(_HORIZON, _LAST)
    if steps is not None and steps[0] != steps[1]:
        yield from _lines([_HORIZON], f"the schedule {checked.values.get(f'{_SCHEDULE}.name')} does not read it")


def _asks(checked: Checked, key: str) -> bool:
    value = checked.values.get(key)
    return bool(value) and (value is True or value != 1)


def _lines(keys: Iterable[str], reason: str) -> Iterator[str]:
    if named := ", ".join(keys):
        yield f"{named}: no effect, since {reason}"


_CACHE, _COMPILE, _LNC = "compiler_cache_url", "model.compile", "trainer.lnc"


def find_notes(checked: Checked, composition: Composition) -> tuple[str, ...]:
    """Return the lines that name keys without an effect, and those that are deprecated."""
    engine = composition.components.get("engine")
    xla = engine is not None and "xla" in engine.record.capabilities
    components = (found for section, cls in composition.classes.items() for found in _deprecated(cls, section, checked))
    notes = [
        deprecation_text(path, use=mark.use, goes=mark.goes)
        for path, key in (*_deprecated(RunConfig, "", checked), *components)
        if (mark := key.mark(Deprecated)) is not None
    ]
    if engine is not None and not xla and checked.values.get(_LNC) is not None:
        notes.append(f"{_LNC}: no effect, since the engine {engine.record.name!r} does not read it")
    if not xla and checked.values.get(_CACHE) is not None and not checked.values.get(_COMPILE):
        notes.append(f"{_CACHE}: no effect, since {_COMPILE} is false")
    return (*notes, *find_idle(checked, composition.classes))


def _deprecated(cls: type, path: str, checked: Checked) -> Iterator[tuple[str, Key]]:
    """Deprecated keys of a section's class that are set."""
    for name, key in keys_of(cls).items():
        where = join(path, name)
        node = checked.tree.find(where)
        if node is None:
            continue
        if key.section is not None and isinstance(node.value, dict):
            yield from _deprecated(key.section, where, checked)
        elif key.mark(Deprecated) and node.origin.kind != "default":
            yield where, key
