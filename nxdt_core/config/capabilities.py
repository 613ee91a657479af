"""What a configuration asks of its engine, model and optimizer, against what their records declare.

The words are those of :data:`nxdt_core.api.CAPABILITIES`. A component without a declared capability is not asked for
it, so a setting that an engine would not read is an error here, before anything is launched. A run under another
launcher has as many processes as they start: :func:`check_capabilities` then repeats the check with that number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from nxdt_core.api import CAPABILITIES, AdapterComponent
from nxdt_core.config.checks import CP, EP, PP, TP, WORLD, Checked
from nxdt_core.config.schema import SLOTS, ResolvedConfig, Selected
from nxdt_core.config.tree import Origin, dotted
from nxdt_core.errors.configuration import CapabilityMissing, ConfigError
from nxdt_core.kernel.registry import Registry
from nxdt_core.protocols.precision import PrecisionPolicy

__all__ = ["Asked", "check_capabilities", "find_undeclared"]

_SP = "distributed_strategy.sequence_parallel"
_ZERO, _ZERO_STAGE = "distributed_strategy.zero1", "distributed_strategy.zero_stage"
_SETTINGS = {
    "model.activations_checkpoint_granularity": ("recompute", "Set it to null"),
    "model.compile": ("compile", "Set it to false"),
    "model.trainable": ("adapters", "Leave it out"),
    "model.optim.param_groups": ("param_groups", "Leave it out"),
}
"""Setting → the capability of the engine that it needs, and what to write to do without."""
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
    """Yield what the selected engine, model and optimizer do not declare and the configuration asks for, each once, at
    the first setting that needs it.

    Args:
        checked: the values.
        components: those that are selected.
        registry: knows who declares what.
    """
    asked = [*_of_the_layout(checked), *_of_the_step(checked), *_of_components(checked, components)]
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
            if capability == "sp" and "tp" in told:
                continue  # one message suffices
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


def check_capabilities(config: ResolvedConfig, *, world_size: int) -> None:
    """Check a run of ``world_size`` processes, which may not be those that the configuration speaks of.

    Raises:
        ConfigError: the engine, the model or the optimizer does not declare what this asks of them, or the engine's
            rules refuse it.
    """
    trainer = config.run.trainer
    if world_size == trainer.devices * trainer.num_nodes:
        return  # that was checked as it was loaded
    started = Origin(kind="override", where="the processes that were started")
    tree = config.tree.copy()
    tree.set(WORLD[0], world_size, started)
    tree.set(WORLD[1], 1, started)
    checked = Checked({dotted(path): value for path, value in tree.leaves()}, tree)
    rules = config.selected("engine").component.load_rules()
    problems = [] if rules is None else [*rules(checked)]
    if problems := [*find_undeclared(checked, config.components, config.kernel.registry), *problems]:
        raise ConfigError(source=config.source, problems=tuple(problems))


def _of_the_layout(checked: Checked) -> Iterator[Asked]:
    """Yield dimensions above 1, and what shards over them."""
    for key, name in ((TP, "tp"), (CP, "cp"), (EP, "ep"), (PP, "pp")):
        size = checked.numbers(key)
        if size is not None and size[0] > 1:
            yield Asked((key,), str(size[0]), "Set it to 1", name, name, "sharded" if name in ("tp", "ep") else None)
            if name == "tp" and checked.values.get(_SP):
                yield Asked((_SP,), "true", "Set it to false", model="sp")
    sizes = checked.mesh_sizes()
    if sizes is None:
        return
    if sizes.dp > 1:
        copies = sizes.world_size // sizes.dp
        one_copy = f"Run it in {'1 process' if copies == 1 else f'{copies} processes'} ({WORLD[0]} x {WORLD[1]})"
        yield Asked(WORLD, f"{sizes.dp} data parallel ranks", one_copy, "dp")
    if sizes.fsdp > 1 and sizes.zero_stage > 0:
        key, off = _ZERO, f"Set {_ZERO} to false"
        if checked.values.get(_ZERO_STAGE) is not None:
            key, off = _ZERO_STAGE, f"{off} and {_ZERO_STAGE} to null"
        yield Asked((key,), f"ZeRO-{sizes.zero_stage} over {sizes.fsdp} ranks", off, optimizer="sharded")


def _of_the_step(checked: Checked) -> Iterator[Asked]:
    """Yield settings of the step that are not off."""
    for key, (name, instead) in _SETTINGS.items():
        if value := checked.values.get(key):
            words = {"model.trainable": "frozen parameters", "model.compile": "true"}
            found = f"{len(value)} groups of parameters" if name == "param_groups" else words.get(key, str(value))
            yield Asked((key,), found, instead, name)


def _of_components(checked: Checked, components: Components) -> Iterator[Asked]:
    """Yield what the records of the other components require, and the policy that a precision makes."""
    for slot in SLOTS:
        selected = components.get(slot.kind)
        if selected is None:
            continue
        record = selected.component.record
        instead = "Leave the section out" if slot.kind == "adapter" else "Choose another"
        needed = set(record.requires)
        if isinstance(record, AdapterComponent):
            needed.add("adapters")
            for name in sorted(record.requires_of_model):
                yield Asked((slot.key,), record.name, instead, model=name)
        policy = checked.policy
        if slot.kind == "precision" and policy is not None and policy != PrecisionPolicy(name=policy.name):
            needed.add("precision")
        for name in sorted(needed):
            yield Asked((slot.key,), record.name, instead, engine=name)
