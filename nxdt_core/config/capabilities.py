"""What a configuration asks of its engine, model and optimizer, against what their records declare.

The words are those of :data:`nxdt_core.api.CAPABILITIES`. A component without a declared capability is not asked for
it, so a setting that an engine would not read is an error here, before anything is launched. A run under another
launcher has as many processes as they start: :func:`check_capabilities` then repeats the check with that number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

from nxdt_core.api import CAPABILITIES, AdapterComponent
from nxdt_core.config.checks import CP, EP, PP, REPLICAS, TP, VPP, WORLD, Checked, mesh_sizes
from nxdt_core.config.schema import SLOTS, ResolvedConfig, Selected
from nxdt_core.config.tree import Origin, dotted
from nxdt_core.errors.configuration import CapabilityMissing, ConfigError
from nxdt_core.kernel.registry import Registry
from nxdt_core.protocols.precision import PrecisionPolicy

__all__ = ["Asked", "check_capabilities", "find_undeclared"]

_STRATEGY = "distributed_strategy"
_SP, _PAD = f"{_STRATEGY}.sequence_parallel", f"{_STRATEGY}.pad_heads"
_REGATHER = f"{_STRATEGY}.sequence_parallel_regather"
_SCHEDULE, _METHOD = f"{_STRATEGY}.pipeline_schedule", f"{_STRATEGY}.context_parallel_method"
_ZERO, _ZERO_STAGE = f"{_STRATEGY}.zero1", f"{_STRATEGY}.zero_stage"
_SHUFFLE = f"{_STRATEGY}.token_shuffle_group_size"
_TRAINABLE = "model.trainable"
_BASE, _COMPILE = "adapter.base_dtype", "model.compile"
_RECOMPUTE, _GROUPS = "model.activations_checkpoint_granularity", "model.optim.param_groups"
_SIZES = (TP, PP, VPP, CP, EP, _SHUFFLE)
_SELECTORS = {slot.kind: slot.key for slot in SLOTS}

Components = Mapping[str, Selected | None]
"""By kind; one whose component cannot be had is absent."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A setting that needs capabilities."""

    keys: tuple[str, ...]
    """The setting; where there are several, a problem names the first that is written."""
    found: str
    """Its value, for the message."""
    instead: str
    """What to write to do without."""
    engine: str | None = None
    """Capability of the engine that it needs."""
    model: str | None = None
    optimizer: str | None = None


def find_undeclared(checked: Checked, components: Components, registry: Registry) -> Iterator[CapabilityMissing]:
    """Yield what the selected engine, model and optimizer do not declare and the configuration asks for.

    Args:
        checked: the values.
        components: those that are selected.
        registry: knows who declares what.
    """
    asked = [*_of_the_layout(checked), *_of_the_step(checked), *_of_components(components)]
    yield from _missing(checked, components, asked, registry)


def check_capabilities(config: ResolvedConfig, *, world_size: int) -> None:
    """Check a run of ``world_size`` processes, which may not be those that the configuration speaks of.

    Raises:
        ConfigError: the engine, the model or the optimizer does not declare what this asks of them.
    """
    trainer = config.run.trainer
    if world_size == trainer.devices * trainer.num_nodes:
        return  # that was checked as it was loaded
    started = Origin(kind="override", where="the processes that were started")
    tree = config.tree.copy()
    tree.set(WORLD[0], world_size, started)
    tree.set(WORLD[1], 1, started)
    checked = Checked({dotted(path): value for path, value in tree.leaves()}, tree)
    if problems := tuple(find_undeclared(checked, config.components, config.kernel.registry)):
        raise ConfigError(source=config.source, problems=problems)


def _of_the_layout(checked: Checked) -> Iterator[Asked]:
    """Dimensions above 1, what is read with them, and what shards over them."""
    given, one, off = checked.values.get, "Set it to 1", "Set it to false"
    size = {key: str(found[0]) for key in _SIZES if (found := checked.numbers(key)) is not None and found[0] > 1}
    if TP in size:
        yield Asked((TP,), size[TP], one, "tp", "tp", "sharded")
        if given(_SP):
            yield Asked((_SP,), "true", off, "sp", "sp")
        if given(_SP) and given(_REGATHER):
            yield Asked((_REGATHER,), "true", off, "sp:regather")
        if given(_PAD):
            yield Asked((_PAD,), "true", off, "pad_heads")
    if CP in size:
        yield Asked((CP,), size[CP], one, "cp", "cp")
        if (method := given(_METHOD)) is not None:
            yield Asked((_METHOD,), method, "Leave it out, and the engine chooses", f"cp:{method}")
    if EP in size:
        yield Asked((EP,), size[EP], one, "ep", "ep", "sharded")
    if _SHUFFLE in size:
        yield Asked((_SHUFFLE,), size[_SHUFFLE], one, "token_shuffle")
    if PP in size:
        yield Asked((PP,), size[PP], one, "pp", "pp")
        if VPP in size:
            yield Asked((VPP,), size[VPP], one, "vpp")
        schedule = given(_SCHEDULE) or ("interleaved" if VPP in size else "1f1b")
        yield Asked((_SCHEDULE, VPP, PP), f"the schedule {schedule}", "Choose another schedule", f"pp:{schedule}")
    yield from _of_data_parallel(checked)


def _of_data_parallel(checked: Checked) -> Iterator[Asked]:
    sizes = mesh_sizes(checked)
    if sizes is None:
        return
    if sizes.dp > 1:
        copies = sizes.world_size // sizes.dp
        one_copy = f"Run it in {'1 process' if copies == 1 else f'{copies} processes'} ({WORLD[0]} x {WORLD[1]})"
        yield Asked(WORLD, f"{sizes.dp} data parallel ranks", one_copy, "dp")
    if sizes.fsdp == 1 or sizes.zero_stage == 0:
        return
    key, off = _ZERO, f"Set {_ZERO} to false"
    if checked.values.get(_ZERO_STAGE) is not None:
        key, off = _ZERO_STAGE, f"{off} and {_ZERO_STAGE} to null"
    shards = f"ZeRO-{sizes.zero_stage} over {sizes.fsdp} ranks"
    yield Asked((key,), shards, off, f"zero{sizes.zero_stage}", optimizer="sharded")
    if sizes.dp_replicate > 1:
        yield Asked((REPLICAS,), str(sizes.dp_replicate), "Set it to 1", "dp_replicate")


def _of_the_step(checked: Checked) -> Iterator[Asked]:
    granularity, groups = checked.values.get(_RECOMPUTE), checked.values.get(_GROUPS)
    if granularity is not None:
        yield Asked((_RECOMPUTE,), granularity, "Set it to null", "recompute")
    if checked.values.get(_COMPILE):
        yield Asked((_COMPILE,), "true", "Set it to false", "compile")
    if (base := checked.values.get(_BASE)) is not None:
        yield Asked((_BASE,), base, "Leave it out", "quantised_base")
    if checked.values.get(_TRAINABLE) is not None:
        yield Asked((_TRAINABLE,), "frozen parameters", "Leave it out", "adapters")
    if groups:
        yield Asked((_GROUPS,), f"{len(groups)} groups of parameters", "Leave it out", "param_groups")


def _of_components(components: Components) -> Iterator[Asked]:
    """What the records of the other components require, and the policy that a precision makes."""
    for slot in SLOTS:
        selected = components.get(slot.kind)
        if selected is None:
            continue
        record = selected.component.record
        needed = set(record.requires)
        if isinstance(record, AdapterComponent):
            needed.add("adapters")
            for name in sorted(record.requires_of_model):
                yield Asked((slot.key,), record.name, _instead(slot.kind), model=name)
        if slot.kind == "precision":
            with suppress(Exception, SystemExit):  # what fails here fails again, with its traceback, in a run
                policy: PrecisionPolicy = selected.component.load_target()(selected.config)
                needed |= policy.needs
        for name in sorted(needed):
            yield Asked((slot.key,), record.name, _instead(slot.kind), engine=name)


def _instead(slot: str) -> str:
    return "Leave the section out" if slot == "adapter" else "Choose another"


def _missing(
    checked: Checked, components: Components, asked: Iterable[Asked], registry: Registry
) -> Iterator[CapabilityMissing]:
    """Each lack once, at the first setting that needs it."""
    asked = list(asked)
    for slot in ("engine", "model", "optimizer"):
        selected = components.get(slot)
        if selected is None:
            continue
        component = selected.component
        told: set[str] = set()
        for each in asked:
            capability = getattr(each, slot)
            if capability is None or capability in component.record.capabilities | told:
                continue
            told.add(capability)
            if not _follows(capability, told):
                yield CapabilityMissing(
                    **checked.place(*each.keys),
                    found=each.found,
                    instead=each.instead,
                    capability=capability,
                    meaning=CAPABILITIES[component.kind].get(capability, ""),
                    kind=component.kind,
                    name=component.record.name,
                    dist=component.dist,
                    selector=_SELECTORS[slot],
                    others=tuple(
                        found.record.name
                        for found in registry.all(component.kind)
                        if capability in found.record.capabilities
                    ),
                )


_PARENTS = {"sp": ("tp",), "pad_heads": ("tp",), "vpp": ("pp",), "dp_replicate": ("dp",)} | {
    f"zero{stage}": ("dp", "cp") for stage in (1, 2, 3)
}


def _follows(capability: str, told: set[str]) -> bool:
    """Whether it is read only with one that is missing as well, so that one message suffices."""
    head, _, of = capability.partition(":")
    return bool(told & {*_PARENTS.get(capability, ()), *([head] if of else [])})
