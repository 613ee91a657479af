"""Rules over values that are each right: what cannot work together, what components do not declare, what has no effect.

What one engine asks of heads, stages or sequences is named by its record (:attr:`nxdt_core.api.EngineComponent.rules`).
A component without a declared capability (:data:`nxdt_core.api.CAPABILITIES`) is not asked for it, so a setting that an
engine would not read is an error here, before anything is launched. A setting without an effect gives a note, not an
error: a file may run on fewer devices than it was written for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import PurePath
from typing import Any

from nxdt_core.api import CAPABILITIES, AdapterComponent, ModelComponent, StoreComponent
from nxdt_core.config.schema import (
    SLOTS,
    DistributedStrategyConfig,
    EarlyStoppingParams,
    EmaConfig,
    ResolvedConfig,
    Selected,
    mode_of,
)
from nxdt_core.config.section import FORMS, PartOf, ScheduleSection, Section, keys_of, seconds_of
from nxdt_core.config.tree import Origin, Tree, dotted, join, plain
from nxdt_core.errors import NxdtError
from nxdt_core.errors.base import either
from nxdt_core.errors.configuration import (
    BadComponentChoice,
    BadComponentConfig,
    CapabilityMissing,
    ComponentFinding,
    ConfigError,
    ConfigProblem,
    ImpossibleCombination,
    Misfit,
    Place,
    WrongValue,
)
from nxdt_core.errors.launch import UnknownAccelerator, WorldDoesNotDivide
from nxdt_core.errors.plugins import ComponentUnusable
from nxdt_core.errors.training import NoMasterWeights
from nxdt_core.kernel import Kernel, RegisteredComponent
from nxdt_core.kernel.hookspecs import ValidateConfigContext
from nxdt_core.kernel.registry import Registry
from nxdt_core.protocols.mesh import MeshSizes
from nxdt_core.protocols.precision import PrecisionPolicy
from nxdt_core.system.paths import scheme_of

_STRATEGY, _SCHEDULE = "distributed_strategy", "model.optim.sched"
TP = f"{_STRATEGY}.tensor_model_parallel_size"
PP = f"{_STRATEGY}.pipeline_model_parallel_size"
VPP = f"{_STRATEGY}.virtual_pipeline_model_parallel_size"
CP = f"{_STRATEGY}.context_parallel_size"
EP = f"{_STRATEGY}.expert_model_parallel_size"
REPLICAS = f"{_STRATEGY}.dp_replicate"
WORLD = ("trainer.devices", "trainer.num_nodes")
BATCH, MICRO_BATCH = "data.global_batch_size", "data.micro_batch_size"

_SP, _ZERO, _ZERO_STAGE = (f"{_STRATEGY}.{name}" for name in ("sequence_parallel", "zero1", "zero_stage"))
_GRANULARITY, _RECOMPUTE = "model.activations_checkpoint_granularity", "model.activations_checkpoint_recompute"
_WARMUP, _HORIZON = f"{_SCHEDULE}.warmup_steps", f"{_SCHEDULE}.max_steps"
_LAST, _ACCELERATOR, _URI = "trainer.max_steps", "trainer.accelerator", "checkpoint.uri"
_STRATEGY_KEYS = {name: f"{_STRATEGY}.{name}" for name in keys_of(DistributedStrategyConfig)}


_SETTINGS = {
    "model.activations_checkpoint_granularity": ("recompute", "Set it to null"),
    "model.compile": ("compile", "Set it to false"),
    "model.trainable": ("adapters", "Leave it out"),
    "model.optim.param_groups": ("param_groups", "Leave it out"),
}
"""Setting → the capability of the engine that it needs, and what to write to do without."""
_MANAGER = "exp_manager"
_REGATHER, _KV_REPLICATOR = f"{_STRATEGY}.sequence_parallel_regather", f"{_STRATEGY}.kv_replicator"
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


@dataclass(frozen=True, slots=True)
class Checked:
    """The values that were read; a wrong one is absent, and rules that need it keep silent."""

    values: Mapping[str, Any]
    tree: Tree
    components: Mapping[str, Selected | None] = field(default_factory=dict)
    """Those that are selected, by kind; one that is unavailable is absent. Their names of modules and marks of keys
    count."""
    policy: PrecisionPolicy | None = None

    def numbers(self, *keys: str) -> tuple[int, ...] | None:
        """Return the values of ``keys``, or None where one of them is absent, ``null`` or no number."""
        numbers = tuple(map(self.values.get, keys))
        return None if any(type(value) not in (int, float) for value in numbers) else numbers  # type: ignore[return-value]

    def place(self, *keys: str) -> Place:
        """Return the place of a problem between ``keys``: the first that is written, by default the first."""
        key = next((key for key in keys if self.tree.origin(key).kind != "default"), keys[0])
        return self.tree.origin(key).at(key)

    def impossible(self, *keys: str, reason: str, advice: str, cause: Misfit | None = None) -> ImpossibleCombination:
        """Return the problem of values of ``keys`` that exclude each other."""
        return ImpossibleCombination(**self.place(*keys), reason=reason, advice=advice, cause=cause)

    def mesh_sizes(self) -> MeshSizes | None:
        """Return the size of every dimension; None where they do not fit the processes or one is wrong."""
        world, values = self.numbers(*WORLD), self.values
        if world is None or not values.keys() >= set(_STRATEGY_KEYS.values()):
            return None
        keys = {name: values[key] for name, key in _STRATEGY_KEYS.items()}
        try:
            return DistributedStrategyConfig.model_construct(**keys).mesh_sizes(world[0] * world[1])
        except WorldDoesNotDivide:
            return None

    def micro_batches(self) -> int | None:
        """Return the micro-batches of one step on each data parallel rank; None where the batch does not divide."""
        batch, sizes = self.numbers(BATCH, MICRO_BATCH), self.mesh_sizes()
        if batch is None or sizes is None:
            return None
        count, rest = divmod(batch[0], batch[1] * sizes.dp)
        return None if rest else count


def find_problems(checked: Checked, kernel: Kernel, *, asks_plugins: bool) -> list[ConfigProblem]:
    """Return the problems that the rules of the core, of the components and of plugins find in values that are right.

    Args:
        checked: The values and components.
        kernel: Knows who declares what.
        asks_plugins: Whether to call the hook ``nxdt_validate_config``, which expects a configuration of right types.
    """
    components = checked.components
    precision = components.get("precision")
    if precision is not None:
        with suppress(Exception, SystemExit):  # what fails here fails again, with its traceback, in a run
            checked = replace(checked, policy=precision.component.load_target()(precision.config))
    problems = list(find_impossible(checked))
    accelerator, known = checked.values.get(_ACCELERATOR, "auto"), kernel.registry.names("device")
    if accelerator not in ("auto", *known):  # whether this machine has it is for a run to see
        error = UnknownAccelerator(accelerator=accelerator, known=known)
        problems.append(BadComponentChoice(**checked.place(_ACCELERATOR), error=error))
    engine = components.get("engine")
    if engine is not None:
        with _guarded(engine.component, checked.place("parallel_engine.name"), "rules", problems):
            rules = engine.component.load_rules()
            problems.extend(() if rules is None else rules(checked))
    problems += find_undeclared(checked, kernel.registry)
    for slot in SLOTS:
        selected = components.get(slot.kind)
        if selected is not None and isinstance(selected.config, Section):
            with _guarded(selected.component, checked.place(slot.section), "check", problems):
                for key, message in selected.config.check():
                    place = checked.place(join(slot.section, key))
                    if isinstance(message, NxdtError):
                        problems.append(BadComponentChoice(**place, error=message))
                        continue
                    end = "" if message.endswith((".", "!", "?")) else "."
                    problems.append(ComponentFinding(**place, message=f"{message}{end}"))
    if not asks_plugins:
        return problems
    names = {kind: selected.component.qualified_name for kind, selected in components.items() if selected is not None}
    context = ValidateConfigContext(config=plain(checked.tree.data), components=names, kernel=kernel)
    try:
        for plugin, findings in kernel.call("nxdt_validate_config", context=context):
            for finding in findings:
                message = f"{finding.message} (plugin {plugin.name!r})."
                place = checked.place(finding.key)
                problems.append(ComponentFinding(**place, message=message, advice=finding.remedy))
    except NxdtError as error:
        problems.append(BadComponentChoice(**checked.place("plugins"), error=error))
    return problems


@contextmanager
def _guarded(component: RegisteredComponent, place: Place, what: str, problems: list[ConfigProblem]) -> Iterator[None]:
    """Add any exception of a plugin's code in the block to ``problems``, with the plugin's name."""
    try:
        yield
    except ComponentUnusable as error:
        problems.append(BadComponentChoice(**place, error=error))
    except Exception as error:
        reason = f"its {what} raised {type(error).__name__}: {error}"
        name, dist = component.qualified_name, component.dist
        problems.append(BadComponentConfig(**place, component=name, dist=dist, reason=reason))


def find_impossible(checked: Checked) -> Iterator[ConfigProblem]:
    """Yield the problems of values that are each right."""
    value_of, numbers, excluded = checked.values.get, checked.numbers, checked.impossible

    # The run's length, its validations, and what it writes on the way.
    stopping = "exp_manager.create_early_stopping_callback"
    by_steps, by_passes = "trainer.val_check_interval", "trainer.check_val_every_n_epoch"
    if value_of(stopping) and value_of(by_steps, "") is None and value_of(by_passes, "") is None:
        reason = "early stopping judges after each validation, and the run has none"
        yield excluded(stopping, by_steps, reason=reason, advice=f"Set {by_steps}.")
    for section, switch in (
        ("checkpoint", "checkpoint.enabled"),
        ("exp_manager.early_stopping_callback_params", stopping),
    ):
        monitor, mode = f"{section}.monitor", f"{section}.mode"
        if value_of(switch) and value_of(mode, "") is None and mode_of(metric := value_of(monitor, "step")) is None:
            reason = f"the name {metric!r} does not say whether a small or a large value is good"
            yield excluded(monitor, mode, reason=reason, advice=f"Set {mode} to min or max.")
    for steps, passes in (
        (by_steps, by_passes),
        ("checkpoint.every_n_train_steps", "checkpoint.every_n_epochs"),
    ):
        if value_of(passes) and value_of(steps):
            reason = f"it counts passes over the data, and {steps} counts steps"
            yield excluded(passes, steps, reason=reason, advice="Set one of them to null.")
    for key, advice in (
        ("trainer.max_epochs", "-1 leaves the end to trainer.max_steps."),
        ("trainer.limit_train_batches", "null takes all."),
    ):
        if value_of(key) == 0:
            yield excluded(key, reason="0 trains nothing", advice=advice)
    for keys in (("exp_manager.name", "name"), ("exp_manager.version",)):
        directory = PurePath(str(value_of(keys[0]) or ""))
        if value_of("exp_manager.explicit_log_dir") is None and (directory.is_absolute() or ".." in directory.parts):
            reason = f"the directory '{directory}' of the run would not be in exp_manager.exp_dir"
            advice = "Take out '..' and a leading '/'. exp_manager.explicit_log_dir names a directory anywhere."
            yield excluded(*keys, reason=reason, advice=advice)
    local, whole = "exp_manager.log_local_rank_0_only", "exp_manager.log_global_rank_0_only"
    if value_of(local) and value_of(whole):
        reason = f"it wants a log of each node, and {whole} one of the run"
        yield excluded(local, whole, reason=reason, advice="Keep one of them.")

    # Processes fill copies of the model, in equal groups, and the batch fills processes.
    if (layout := numbers(*WORLD, TP, PP, CP)) is not None:
        devices, nodes, tp, pp, cp = layout
        dp, rest = divmod(devices * nodes, tp * pp * cp)
        copies = numbers(REPLICAS, EP)
        if rest:
            groups, uneven = divmod(devices * nodes, pp * cp)
            name = "trainer.devices x trainer.num_nodes" + (" / (PP x CP)" if pp * cp > 1 else "")
            cause = None if uneven else Misfit(of=TP, divisor=tp, place=checked.place(TP), name=name, number=groups)
            reason = f"{nodes} x {devices} processes do not divide into groups of TP {tp} x PP {pp} x CP {cp}"
            advice = f"Make trainer.devices x trainer.num_nodes a multiple of {tp * pp * cp}."
            yield excluded(*WORLD, TP, PP, CP, reason=reason, advice=advice, cause=cause)
        elif copies is not None and dp % copies[0]:
            reason = f"{dp} data parallel ranks do not divide into {copies[0]} groups"
            yield excluded(REPLICAS, *WORLD, reason=reason, advice=f"Choose a divisor of {dp}.")
        elif copies is not None and (shards := dp // copies[0] * cp) % copies[1]:
            ranks = f"{shards} data and context parallel ranks"
            reason = f"expert parallelism borrows from {ranks}, which EP {copies[1]} does not divide"
            yield excluded(EP, REPLICAS, CP, *WORLD, reason=reason, advice=f"Choose a divisor of {shards}.")
    batch, mesh = numbers(BATCH, MICRO_BATCH), checked.mesh_sizes()
    if batch is not None and mesh is not None and batch[0] % (batch[1] * mesh.dp):
        reason = f"{batch[0]} does not divide by {MICRO_BATCH} {batch[1]} x {mesh.dp} data parallel ranks"
        yield excluded(BATCH, MICRO_BATCH, reason=reason, advice=f"Write a multiple of {batch[1] * mesh.dp}.")

    # Sharding, weights, dtypes, what is recomputed, learning rates, sequences and files of metrics.
    if value_of(_ZERO_STAGE) is not None and value_of(_ZERO) is False:
        reason = f"zero_stage {value_of(_ZERO_STAGE)} shards, and zero1: false says not to"
        yield excluded(_ZERO_STAGE, _ZERO, reason=reason, advice="Leave zero1 out, or set zero_stage to null.")
    weights, source = "checkpoint.weight_init_only", "checkpoint.resume_from"
    if value_of(weights) and value_of(source, "") is None:
        reason = f"weight_init_only takes the weights of a checkpoint, and {source} names none"
        yield excluded(weights, reason=reason, advice=f"Set {source}.")
    store, uri, address = checked.components.get("store"), value_of(_URI), "checkpoint.storage.name"
    if store is not None and isinstance(store.component.record, StoreComponent) and _URI in checked.values:
        scheme = scheme_of(uri or "")
        if scheme not in (schemes := store.component.record.uri_schemes):
            served, given_as = (
                either([f"{name}://" for name in schemes]),
                "a path" if scheme == "file" else f"{scheme}://…",
            )
            reason = f"the store {store.component.record.name!r} is for {served} addresses, and {_URI} is {given_as}"
            yield excluded(address, _URI, reason=reason, advice=f"Leave {address} out: {_URI} decides.")
    masters, rounded = "checkpoint.use_master_weights_in_ckpt", "checkpoint.save_bf16"
    if value_of(masters) and value_of(rounded):
        reason = f"it wants float32 as the model's weights, and {rounded}: true wants bfloat16"
        yield excluded(masters, rounded, reason=reason, advice="Keep one of them; a resume is exact with either.")
    policy = checked.policy
    if (
        value_of(masters)
        and policy is not None
        and not policy.master_weights
        and policy.parameters in ("bfloat16", "float16")
    ):
        error = NoMasterWeights(precision=policy.name, dtype=policy.parameters)
        yield BadComponentChoice(**checked.place(masters, "precision.type"), error=error)
    chunks, smoothing = "model.loss_chunk_tokens", "objective.label_smoothing"
    if value_of(chunks) is not None and value_of(smoothing) and value_of("objective.name") == "causal_lm":
        reason = f"it smooths logits, and with {chunks} the head returns losses"
        yield excluded(smoothing, chunks, reason=reason, advice=f"Set {smoothing} to 0, or {chunks} to null.")
    narrow, optimizer = "precision.optimizer_state", "model.optim.name"
    if value_of(narrow) == "bfloat16" and value_of(optimizer) == "adamw_fp32OptState":
        reason = f"it says bfloat16, and {optimizer}: adamw_fp32OptState says float32"
        advice = f"Set {optimizer} to adamw, or {narrow} to float32."
        yield excluded(narrow, optimizer, reason=reason, advice=advice)
    if value_of(_RECOMPUTE) and value_of(_GRANULARITY) == "full":
        reason = "whole layers are recomputed under granularity 'full', so naming modules means nothing"
        advice = f"Set {_GRANULARITY} to selective, or leave the names out."
        yield excluded(_RECOMPUTE, reason=reason, advice=advice)
    if not value_of(_RECOMPUTE) and value_of(_GRANULARITY) == "selective":
        reason = f"selective recomputes what {_RECOMPUTE} names, and that names nothing"
        advice = f"Name modules there, such as CoreAttention, or set {_GRANULARITY} to full."
        yield excluded(_GRANULARITY, _RECOMPUTE, reason=reason, advice=advice)
    base, adapter = "adapter.base_dtype", "adapter.name"
    if value_of(base) is not None and value_of(adapter, "") is None:
        reason = f"it quantises what an adapter freezes, and {adapter} names none"
        yield excluded(base, reason=reason, advice=f"Set {adapter}, such as lora, or leave {base} out.")
    trainable = "model.trainable"
    if value_of(trainable) is not None and (named := value_of(adapter, "")) is not None:
        reason = f"{adapter}: {named} decides what is frozen"
        advice = "Leave one of them out; adapter.modules_to_save of lora names modules that train whole."
        yield excluded(trainable, adapter, reason=reason, advice=advice)
    if value_of(base) is not None and mesh is not None and mesh.zero_stage == 3 and mesh.fsdp > 1:
        reason = f"each rank has all codes of its layers, and {_ZERO_STAGE}: 3 would shard them"
        yield excluded(base, _ZERO_STAGE, reason=reason, advice=f"Set {_ZERO_STAGE} to 1 or 2.")
    floor, rate = f"{_SCHEDULE}.min_lr", "model.optim.lr"
    if (rates := numbers(floor, rate)) is not None and rates[0] > rates[1]:
        reason = f"min_lr {rates[0]} is above the learning rate {rates[1]} ({rate}) that falls to it"
        yield excluded(floor, rate, reason=reason, advice=f"Lower {floor} or raise {rate}.")
    length, longest = "data.seq_length", "model.max_position_embeddings"
    if (sizes := numbers(length, longest)) is not None and sizes[0] > sizes[1]:
        reason = f"sequences have {sizes[0]} tokens, the model has positions for {sizes[1]} ({longest})"
        yield excluded(length, longest, reason=reason, advice=f"Shorten {length} or raise {longest}.")
    metrics = "exp_manager.monitoring.metrics_file"
    if isinstance(file := value_of(metrics), str) and not file.endswith(".prom"):
        reason = "node_exporter reads files whose name ends with .prom"
        yield excluded(metrics, reason=reason, advice="Name it so, such as nxdt.prom.")

    # A rate would jump, or fall from less than its peak, where steps at a constant rate or of decay begin before the
    # warm-up is done. A warm-up alone may be longer: such a run is the beginning of a longer one.
    schedule, model = (checked.components.get(kind) for kind in ("schedule", "model"))
    horizon = numbers(_HORIZON)
    if schedule is not None and schedule.config is not None and horizon is not None:
        cls: Any = type(schedule.config)
        marks = {join(_SCHEDULE, name): key.mark(PartOf) for name, key in keys_of(cls).items()}
        counted = [key for key, mark in marks.items() if mark is not None and mark.key == _HORIZON]
        parts: dict[str, Any] = {key: count for key in counted if (count := value_of(key))}
        if parts and (warmup := value_of(_WARMUP)):
            parts = {_WARMUP: warmup, **parts}
        if (total := sum(parts.values())) > horizon[0]:
            counts = " and ".join(f"{path.rpartition('.')[2]} {count}" for path, count in parts.items())
            reason = f"{counts} {'are' if len(parts) > 1 else 'is'} more than the {horizon[0]} steps of the schedule"
            advice = f"Shorten them, or set {_HORIZON} to at least {total}: a run may end before its schedule does."
            yield excluded(*reversed(parts), _HORIZON, reason=reason, advice=advice)
    record = model.component.record if model is not None else None
    modules = record.recompute_names if isinstance(record, ModelComponent) else None
    if record is not None and modules is not None and value_of(_GRANULARITY) == "selective":
        for name in value_of(_RECOMPUTE) or ():
            if name not in modules:
                near = get_close_matches(name, modules, n=1)
                found = f"{name!r}, which model {record.name!r} does not have"
                hint = f"Did you mean {near[0]!r}?" if near else ""
                yield WrongValue(**checked.place(_RECOMPUTE), found=found, allowed=", ".join(modules), hint=hint)
    for time in ("checkpoint.train_time_interval", "trainer.max_time"):
        try:
            if (value := value_of(time)) is not None:
                seconds_of(value)
        except ValueError:
            yield WrongValue(**checked.place(time), found=checked.tree.describe(time), allowed=FORMS)


def find_undeclared(checked: Checked, registry: Registry) -> Iterator[CapabilityMissing]:
    """Yield what the selected engine, model and optimizer do not declare and the configuration asks for, each once, at
    the first setting that needs it; ``registry`` knows who declares what."""
    values, components = checked.values, checked.components
    # Keys of a setting, its value, what to write to do without, and the capability of each kind that it needs.
    settings: list[tuple[tuple[str, ...], str, str, dict[str, str]]] = []
    for key, name in ((TP, "tp"), (CP, "cp"), (EP, "ep"), (PP, "pp")):
        size = checked.numbers(key)
        if size is not None and size[0] > 1:
            sharded = {"optimizer": "sharded"} if name in ("tp", "ep") else {}
            settings.append(((key,), str(size[0]), "Set it to 1", {"engine": name, "model": name, **sharded}))
            if name == "tp" and values.get(_SP):
                settings.append(((_SP,), "true", "Set it to false", {"model": "sp"}))
    sizes = checked.mesh_sizes()
    if sizes is not None and sizes.dp > 1:
        copies = sizes.world_size // sizes.dp
        one_copy = f"Run it in {'1 process' if copies == 1 else f'{copies} processes'} ({WORLD[0]} x {WORLD[1]})"
        settings.append((WORLD, f"{sizes.dp} data parallel ranks", one_copy, {"engine": "dp"}))
    if sizes is not None and sizes.fsdp > 1 and sizes.zero_stage > 0:
        key, off = _ZERO, f"Set {_ZERO} to false"
        if values.get(_ZERO_STAGE) is not None:
            key, off = _ZERO_STAGE, f"{off} and {_ZERO_STAGE} to null"
        settings.append(((key,), f"ZeRO-{sizes.zero_stage} over {sizes.fsdp} ranks", off, {"optimizer": "sharded"}))
    for key, (name, instead) in _SETTINGS.items():
        if value := values.get(key):
            words = {"model.trainable": "frozen parameters", "model.compile": "true"}
            text = f"{len(value)} groups of parameters" if name == "param_groups" else words.get(key, str(value))
            settings.append(((key,), text, instead, {"engine": name}))
    for slot in SLOTS:
        if (selected := components.get(slot.kind)) is None:
            continue
        record = selected.component.record
        instead = "Leave the section out" if slot.kind == "adapter" else "Choose another"
        needed = set(record.requires)
        if isinstance(record, AdapterComponent):
            needed.add("adapters")
            models = sorted(record.requires_of_model)
            settings += [((slot.key,), record.name, instead, {"model": name}) for name in models]
        policy = checked.policy
        if slot.kind == "precision" and policy is not None and policy != PrecisionPolicy(name=policy.name):
            needed.add("precision")
        settings += [((slot.key,), record.name, instead, {"engine": name}) for name in sorted(needed)]

    selectors = {slot.kind: slot.key for slot in SLOTS}
    for kind in ("engine", "model", "optimizer"):
        if (selected := components.get(kind)) is None:
            continue
        component = selected.component
        missing: set[str] = set()
        for keys, text, instead, needs in settings:
            capability = needs.get(kind)
            if capability is None or capability in component.record.capabilities | missing:
                continue
            missing.add(capability)
            if capability == "sp" and "tp" in missing:
                continue  # one message suffices
            yield CapabilityMissing(
                **checked.place(*keys),
                found=text,
                instead=instead,
                capability=capability,
                meaning=CAPABILITIES[kind].get(capability, ""),
                kind=kind,
                name=component.record.name,
                dist=component.dist,
                selector=selectors[kind],
                others=tuple(
                    other.record.name for other in registry.all(kind) if capability in other.record.capabilities
                ),
            )


def check_capabilities(config: ResolvedConfig, *, world_size: int) -> None:
    """Check a run of ``world_size`` processes, which may not be those that the configuration speaks of: another
    launcher starts as many as it likes.

    Raises:
        ConfigError: the engine, the model or the optimizer does not declare what this asks of them, or the engine's
            rules refuse it.
    """
    trainer = config.run.trainer
    if world_size == trainer.devices * trainer.num_nodes:
        return  # that was checked as it was loaded
    started = Origin(kind="override", where="the processes that were started")
    tree = config.tree.copy()
    for key, count in zip(WORLD, (world_size, 1), strict=True):
        tree.set(key, count, started)
    checked = Checked({dotted(path): value for path, value in tree.leaves()}, tree, config.components)
    rules = config.selected("engine").component.load_rules()
    problems = [] if rules is None else [*rules(checked)]
    if problems := [*find_undeclared(checked, config.kernel.registry), *problems]:
        raise ConfigError(source=config.source, problems=tuple(problems))


def find_notes(checked: Checked) -> Iterator[str]:
    """Yield the lines that name keys without an effect, of a configuration without problems."""
    value_of, engine, schedule = checked.values.get, checked.components["engine"], checked.components["schedule"]
    xla = engine is not None and "xla" in engine.component.record.capabilities
    if engine is not None and not xla and value_of("trainer.lnc") is not None:
        yield f"trainer.lnc: no effect, since the engine {engine.component.record.name!r} does not read it"
    if not xla and value_of("compiler_cache_url") is not None and not value_of("model.compile"):
        yield "compiler_cache_url: no effect, since model.compile is false"
    for switch, (section, cls) in _SWITCHED.items():
        if not value_of(switch):
            keys = keys_of(cls).items()
            changed = [path for name, key in keys if value_of(path := join(section, name), key.default) != key.default]
            yield from _idle(changed, f"{switch} is not set")
    for size, names in _READ_ABOVE_ONE.items():
        if value_of(size) == 1:
            settings = [key for key in names if (value := value_of(key)) is True or (value and value != 1)]
            yield from _idle(settings, f"{size} is 1")
    heads = checked.numbers("model.num_kv_heads", TP, _KV_REPLICATOR)
    if heads is not None and heads[1] > 1 and heads[2] > (needed := max(1, heads[1] // heads[0])):
        copies = "no copies" if needed == 1 else f"{needed} copies"
        yield f"{_KV_REPLICATOR}: {copies} are made, since {TP} is {heads[1]} and model.num_kv_heads {heads[0]}"
    if value_of(_REGATHER) and value_of(TP) != 1 and not value_of(_SP):
        yield from _idle([_REGATHER], f"{_SP} is false")
    elif value_of(_REGATHER) and value_of(TP) != 1 and value_of(_GRANULARITY) == "full":
        yield from _idle([_REGATHER], f"{_GRANULARITY} is full, and layers that are recomputed gather again")

    # ZeRO without ranks to shard over, and tokens exchanged for experts that are never full.
    sizes = checked.mesh_sizes()
    sharding = [key for key in (_ZERO, _ZERO_STAGE) if checked.tree.origin(key).kind != "default" and value_of(key)]
    if checked.numbers(*WORLD) == (1, 1):
        yield from _idle(sharding, "one process has nothing to shard")
    elif sizes is not None and sizes.fsdp == 1:
        yield from _idle(sharding, "the layout leaves no data parallel ranks to shard over")
    if sizes is not None and sizes.zero_stage == 0 and sizes.dp_replicate > 1:
        yield from _idle([REPLICAS], f"{_ZERO} is false and every data parallel rank holds a whole copy")
    shuffle, factor = f"{_STRATEGY}.token_shuffle_group_size", "model.moe.capacity_factor"
    groups = checked.numbers(shuffle, "model.moe.num_experts")
    if groups is not None and groups[0] != 1 and (value_of(factor) or 0) <= 0:
        yield f"{shuffle}: tokens travel for nothing, since {factor} bounds no expert"
    if value_of(_RECOMPUTE) and value_of(_GRANULARITY, "") is None:
        yield from _idle([_RECOMPUTE], f"{_GRANULARITY} is not set")

    # Pipeline schedules that run with few micro-batches and then mostly wait; others are refused.
    count = checked.micro_batches()
    if sizes is not None and count is not None and sizes.pp > 1:
        enough = 2 * sizes.pp - 1 if sizes.schedule == "zbv" else sizes.pp
        if count < enough:
            yield (
                f"{BATCH}: the schedule {sizes.schedule} over {sizes.pp} pipeline ranks is idle for longer than it need"
                f" be with {count} micro-batches per step; {enough} fill it"
            )

    # A warm-up that is not over at the end, and a learning-rate schedule that is longer or shorter than the run.
    lengths = checked.numbers(_HORIZON, _LAST)
    if lengths is None:
        return
    horizon, last = lengths
    ends = schedule is None or not isinstance(schedule.config, ScheduleSection) or schedule.config.reads_max_steps
    end, steps = (_HORIZON, horizon) if ends and horizon <= last else (_LAST, last)
    warmup = checked.numbers(_WARMUP)
    if warmup is not None and 0 < steps <= warmup[0]:
        yield f"{_WARMUP}: the rate only rises, since {end} is {steps} and warm-up takes {warmup[0]} steps"
    if not ends and horizon != last:
        yield from _idle([_HORIZON], f"the schedule {value_of(f'{_SCHEDULE}.name')} does not read it")
    elif horizon > last:
        yield f"{_HORIZON}: the schedule ends at step {horizon}, but the run ends earlier: {_LAST} is {last}"
    elif horizon < last:
        floor = checked.numbers(f"{_SCHEDULE}.min_lr")
        rate = "" if floor is None else f"; the learning rate then stays at min_lr, {floor[0]:g}"
        yield f"{_HORIZON}: the schedule ends at step {horizon}, but the run ends later: {_LAST} is {last}{rate}"


def _idle(keys: Iterable[str], reason: str) -> Iterator[str]:
    if named := ", ".join(keys):
        yield f"{named}: no effect, since {reason}"
