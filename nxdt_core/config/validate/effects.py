"""Settings that are accepted and do nothing: one line for each reason."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from nxdt_core.config.keys import REQUIRED, Key, keys_of
from nxdt_core.config.marks import NoEffect, XlaOnly
from nxdt_core.config.node import from_plain, join, to_plain
from nxdt_core.config.schema.exp_manager import EmaConfig
from nxdt_core.config.schema.run import RunConfig
from nxdt_core.config.slots import Composition
from nxdt_core.config.validate.checked import Checked

__all__ = ["find_notes"]


def find_notes(checked: Checked, composition: Composition, legacy: Iterable[tuple[str, Key]]) -> tuple[str, ...]:
    """Lines that name keys without an effect. ``legacy`` are keys that reading set aside."""
    engine = composition.components.get("parallel_engine")
    reads_xla = engine is not None and "xla" in engine.record.capabilities
    engine_name = engine.record.name if engine is not None else "this"
    reasons: dict[str, list[str]] = {}
    for path, key in (*_set_keys(RunConfig, "", checked), *legacy):
        dead, xla = key.mark(NoEffect), key.mark(XlaOnly)
        if dead is not None:
            reasons.setdefault(dead.reason, []).append(path)
        elif xla is not None and not reads_xla:
            reasons.setdefault(f"the engine {engine_name!r} does not read the XLA runtime's settings", []).append(path)
    notes = [_line(paths, reason) for reason, paths in reasons.items()]
    tp = "distributed_strategy.tensor_model_parallel_size"
    if checked.values.get("distributed_strategy.sequence_parallel") and checked.values.get(tp) == 1:
        notes.append(_line(["distributed_strategy.sequence_parallel"], f"{tp} is 1"))
    notes += _idle(checked)
    return tuple(notes)


def _idle(checked: Checked) -> Iterator[str]:
    """Settings that another one makes idle."""
    ema = "exp_manager.ema"
    if not checked.values.get(f"{ema}.enable"):
        defaults = {join(ema, name): key.default for name, key in keys_of(EmaConfig).items()}
        changed = [path for path, default in defaults.items() if checked.values.get(path, default) != default]
        if changed:
            yield _line(changed, f"{ema}.enable is not set")
    zero, processes = "distributed_strategy.zero1", checked.numbers("trainer.devices", "trainer.num_nodes")
    written_zero = checked.tree.find(zero) is not None and checked.origin(zero).kind != "default"
    if written_zero and checked.values.get(zero) and processes == (1, 1):
        yield _line([zero], "one process has nothing to shard")
    warmup, horizon = "model.optim.sched.warmup_steps", "model.optim.sched.max_steps"
    sizes = checked.numbers(warmup, horizon)
    if sizes is not None and 0 < sizes[1] <= sizes[0]:
        yield f"{warmup}: the rate only rises, since {horizon} is {sizes[1]} and warm-up takes {sizes[0]} steps"


def _line(paths: list[str], reason: str) -> str:
    return f"{', '.join(paths)}: no effect, since {reason}"


def _set_keys(cls: type, path: str, checked: Checked) -> Iterator[tuple[str, Key]]:
    """Marked keys of the core whose value differs from the default."""
    for name, key in keys_of(cls).items():
        where = join(path, name)
        node = checked.tree.find(where)
        if node is None:
            continue
        if key.section is not None and isinstance(node.value, dict):
            yield from _set_keys(key.section, where, checked)
        elif (key.mark(NoEffect) or key.mark(XlaOnly)) and node.origin.kind not in ("default", "alias"):
            default = None if key.default is REQUIRED else to_plain(from_plain(key.default, node.origin))
            if to_plain(node) != default:
                yield where, key
