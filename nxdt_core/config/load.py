"""From a source and overrides to a checked configuration, every problem on the way gathered into one report.

Components, loggers and callbacks are selected by name, or by the rules that apply where a file names none.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from nxdt_core.config import hub
from nxdt_core.config.checks import Checked, find_notes, find_problems
from nxdt_core.config.huggingface import (
    PUBLISHED,
    architectures_of,
    fill_recipe,
    merge_hf_values,
    read_hf_config,
    with_published_model,
)
from nxdt_core.config.read import (
    MANDATORY,
    UNRESOLVED,
    Keys,
    fill,
    has_interpolation,
    interpolate,
    interpolations,
    read,
    read_part,
)
from nxdt_core.config.schema import (
    SLOTS,
    ExpManagerConfig,
    PluginsConfig,
    ResolvedConfig,
    RunConfig,
    Selected,
    Slot,
    usable_class,
)
from nxdt_core.config.section import Key, Section, keys_of, sections_of
from nxdt_core.config.show import (
    hide_credentials,
    hide_secrets,
    hide_secrets_in,
    learn_secrets,
    mask_secrets,
    notes_on_secrets,
)
from nxdt_core.config.sources import BASE, COMMAND_LINE, converted, explained, find_base, read_overrides, read_source
from nxdt_core.config.tree import DEFAULT, KeyPath, Origin, Tree, dotted, join, parts_of, plain, walk
from nxdt_core.errors import NxdtError
from nxdt_core.errors.configuration import (
    BadComponentChoice,
    BadComponentConfig,
    ComponentFinding,
    ConfigError,
    ConfigProblem,
    ImpossibleCombination,
    Misfit,
    MissingKey,
    NotSupported,
    WrongValue,
)
from nxdt_core.errors.hub import HubError
from nxdt_core.errors.plugins import AmbiguousComponent, LocalPluginMissing
from nxdt_core.kernel import Kernel, PluginPolicy, RegisteredComponent
from nxdt_core.kernel.hookspecs import ConfigDefaultsContext
from nxdt_core.kernel.plugin import LOCAL, plugin_notes
from nxdt_core.kernel.registry import reading_model

__all__ = ["PlainFile", "check", "load", "read_file"]


_RESUMES = "checkpoint.resume_if_exists"
_NO_END = 2**31 - 1
"""Steps that no run takes."""


_BY_DEFAULT = "the default"
_RULE_KEYS = ("model.model_config", "checkpoint.uri", "data.tokenizer")
"""Keys that the rules below read in addition to the selectors."""
_FILE = "file://"
_IMPLIED = {"store": _FILE, "tokenizer": "huggingface"}
"""Kind → what is replaced where the source below names no component."""
_LOGGERS, _CALLBACKS = "exp_manager.loggers", "trainer.callbacks"
_FLAGS = {
    "tensorboard": "summary_writer_kwargs",
    "wandb": "wandb_logger_kwargs",
    "mlflow": "mlflow_logger_kwargs",
}
"""Logger → key of ``exp_manager`` with its options; ``create_<logger>_logger`` switches it on."""


def load(
    source: str | Path | Mapping[str, Any],
    overrides: Sequence[str] = (),
    *,
    kernel: Kernel | None = None,
    label: str | None = None,
) -> ResolvedConfig:
    """Read, merge, resolve and check a configuration. Imports no torch and builds nothing.

    Example::

        config = load("run.yaml", ["trainer.max_steps=50"])
        config.run.trainer.max_steps  # 50

    Args:
        source: A YAML file, ``recipe:NAME``, or a mapping such as :meth:`ResolvedConfig.to_dict` gives.
        overrides: ``key.path=value`` each, over the source; over a file of another program also in its keys.
        kernel: A started kernel; by default one is started under the policy of the section ``plugins``.
        label: What errors call a mapping.

    Raises:
        ConfigError: something is wrong; carries every problem.
    """
    # What was written: the source, what it is based on, and overrides.
    written = _collect(source, overrides, kernel, label, converts=True)
    tree, problems, notes = written.tree, written.problems, written.notes
    kernel = written.start_kernel(tree)
    for plugin in () if written.passed else kernel.plugins:  # a file was asked for by name
        if plugin.dist == LOCAL and plugin.state not in ("ok", "blocked"):
            message = f"the plugin file {plugin.location} is {plugin.state}: {plugin.reason}."
            correct = "Correct it, or take it out of plugins.local."
            advice = "Name one of the two." if plugin.state == "shadowed" else correct
            place = tree.origin("plugins.local").at("plugins.local")
            problems.append(ComponentFinding(**place, message=message, advice=advice))
    notes += _drop_replaced(tree, written.layers, kernel)

    # Below that: what a published model and plugins give, the components' names, and defaults. A run that resumes reads
    # the commits of the Hugging Face hub that it began with.
    view, manager = tree, None
    if any(interpolations(tree.data)):
        view = tree.copy()
        interpolate(view, wanted=("name", "exp_manager", _RESUMES, PUBLISHED))
    if view.get(_RESUMES) is True and isinstance(written_manager := view.get("exp_manager", {}), dict):
        manager, _ = read_part(ExpManagerConfig, {"name": view.get("name"), **written_manager})
    hub.begin(None if manager is None else manager.run_dir / "config.yaml")
    try:
        tree, published = with_published_model(tree, view)
    except HubError as error:  # what else is missing would come from that model
        problems.append(BadComponentChoice(**tree.origin(PUBLISHED).at(PUBLISHED), error=error))
        raise _refused(written.label, problems) from None
    try:  # of several plugins the first wins
        context = ConfigDefaultsContext(config=plain(tree.data), source=written.label)
        for plugin, defaults in list(kernel.call("nxdt_config_defaults", context=context)):
            origin = Origin(kind="plugin", where=plugin.name)
            if isinstance(defaults, Mapping):
                tree = _merged(Tree.of(defaults, origin), [tree])
                continue
            reason = f"nxdt_config_defaults gave a {type(defaults).__name__}, not a mapping"
            fault = BadComponentConfig(**origin.at(""), component=plugin.name, dist=plugin.dist, reason=reason)
            problems.append(fault)
    except NxdtError as error:
        problems.append(BadComponentChoice(**Origin(kind="plugin", where="").at(""), error=error))
    keys = Keys()
    selected, choices = _select(tree, keys, kernel, written.label, problems, published=published)
    passes = tree.get("trainer.max_epochs")
    if tree.get("trainer.max_steps") is None and isinstance(passes, int) and passes > 0:  # which alone end it
        tree.set("trainer.max_steps", _NO_END, DEFAULT)
    fill(tree, RunConfig, keys)
    for path, note in written.unread.items():
        notes += () if path in keys.names else (note,)
        while path not in keys.names and not (isinstance(value := tree.get(path), dict) and value):
            tree.remove(path)
            keys.unknown.pop(path, None)
            path = path[:-1]

    # References are replaced, and what must not be shown is known before a message is made.
    problems += interpolate(tree, keys.names.values())
    _mask_options(tree, kernel)
    for path, cls in keys.models:
        mask_secrets(tree, cls, path)
    problems += hide_credentials(tree)
    learn_secrets(tree)

    # One reading by the models of the sections, then the rules over values that are each right.
    instances, faults, values = read(tree, keys)
    problems += explained(faults, tree, keys.names.values(), kernel)
    for path, origin in written.mandatory.items():
        if path in tree and tree.origin(path).kind == "default":
            problems.append(MissingKey(**origin.at(dotted(path)), allowed=f"a value in place of {MANDATORY}"))
    extensions, extension_notes = _select_extensions(tree, kernel, problems)
    sections = {slot.kind: slot.section for slot in SLOTS}
    components = {
        kind: None if component is None else Selected(component=component, config=instances.get(sections[kind]))
        for kind, component in selected.items()
    }
    checked = Checked(values, tree, components)
    problems += find_problems(checked, kernel, asks_plugins=not problems)
    run = instances[""]
    if problems or run is None:
        # A key that takes the value of another one, which is its origin, is as wrong as that one.
        wrong = {("default", problem.key) for problem in problems if problem.key}
        origins = [(problem, tree.origin(problem.key)) for problem in problems]
        raise _refused(written.label, [problem for problem, at in origins if (at.kind, at.where) not in wrong])
    notes = [
        *notes,
        *choices,
        *notes_on_secrets(tree),
        *find_notes(checked),
        *extension_notes,
        *plugin_notes(kernel.plugins),
        *(f"plugins: no installed plugin is called {name!r}" for name in kernel.unmatched_policy()),
    ]
    run_dir = run.exp_manager.run_dir
    return ResolvedConfig(
        run=run,
        kernel=kernel,
        components=components,
        loggers=extensions[_LOGGERS],
        callbacks=extensions[_CALLBACKS],
        source=written.label,
        overrides=tuple(overrides),
        run_dir=run_dir,
        checkpoint_uri=run.checkpoint.uri or str(run_dir / "checkpoints"),
        notes=tuple(map(hide_secrets, notes)),
        tree=tree,
    )


def check(
    source: str | Path | Mapping[str, Any], overrides: Sequence[str] = (), *, kernel: Kernel | None = None
) -> tuple[ConfigProblem, ...]:
    """Return the problems that :func:`load` would raise; none where the configuration is good."""
    try:
        load(source, overrides, kernel=kernel)
    except ConfigError as error:
        return error.problems
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainFile:
    """A YAML file as plain data, for a program that rewrites it."""

    text: str
    written: Mapping[str, Any]
    """Nested values of the file, with ``${…}`` as it is written."""
    resolved: Mapping[str, Any]
    """The same with what each ``${…}`` means; one that means nothing is as it is written."""
    lines: Mapping[str, int]
    """Line of each key by its path, counted from 1; 0 for a key that only an override sets."""


def read_file(path: Path, overrides: Mapping[str, Any] | None = None, sections: Collection[str] = ()) -> PlainFile:
    """Read a YAML file with any keys.

    Args:
        path: The file.
        overrides: Key path → value that replaces the file's before ``${…}`` is resolved.
        sections: Key paths that must be a mapping or empty where they are given.

    Raises:
        ConfigError: the file cannot be read, or is not valid YAML, or a section is something else.
    """
    source = read_source(path, Kernel.start)
    tree, problems = source.tree, list(source.problems)
    for key, value in (overrides or {}).items():
        tree.set(key, value, replace(COMMAND_LINE, line=tree.origin(key).line if key in tree else 0))
    for key in sections:
        if not isinstance(tree.get(key), (dict, type(None))):
            place, described = tree.origin(key).at(key), tree.describe(key)
            problems.append(WrongValue(**place, found=described, allowed="a mapping"))
    if problems:
        raise ConfigError(source=str(path), problems=tuple(problems))
    resolved = tree.copy()
    interpolate(resolved)
    for at, value in list(walk(resolved.data)):
        if value is UNRESOLVED:
            resolved.set(at, tree.get(at), tree.origins[at])
    lines = {dotted(at): tree.origins[at].line for at, _ in walk(tree.data) if at}
    text = path.read_text(encoding="utf-8-sig")
    return PlainFile(text=text, written=tree.data, resolved=resolved.data, lines=lines)


def start_kernel_of(source: str | Path, overrides: Sequence[str] = ()) -> Kernel:
    """Start a kernel under the section ``plugins`` of a configuration, which may be wrong in all others.

    Raises:
        ConfigError: the source cannot be read, or the section is wrong.
    """
    written = _collect(source, overrides, None, None, converts=False)
    return written.start_kernel(written.tree)


@dataclass(slots=True, kw_only=True)
class _Written:
    """What was written, and what is known of it so far."""

    tree: Tree
    label: str
    """Name that the user gave the source."""
    kernel: Kernel | None
    """The kernel that was passed in, or the last one that was started."""
    passed: bool
    problems: list[ConfigProblem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    layers: list[tuple[Tree, Tree]] = field(default_factory=list)
    """What each source writes, and what was merged over it."""
    unread: dict[KeyPath, str] = field(default_factory=dict)
    """Keys of another program that overrides set and that say nothing here, unless nxdt has them, too → why."""
    mandatory: dict[KeyPath, Origin] = field(default_factory=dict)
    """Where the keys are that said ``???``."""

    def start_kernel(self, tree: Tree) -> Kernel:
        """Return the kernel that was passed in, else one under the policy of ``tree``.

        Raises:
            ConfigError: the section ``plugins`` is wrong; carries the problems so far.
        """
        if self.passed and self.kernel is not None:
            return self.kernel
        resolved = tree.copy()
        faults = interpolate(resolved, wanted=("plugins",))
        policy = PluginPolicy()
        if resolved.get("plugins") is not None:
            section, wrong = read_part(PluginsConfig, resolved.copy("plugins"), "plugins")
            faults += wrong
            policy = PluginPolicy(**section.model_dump(exclude={"on_resume"})) if section is not None else policy
        if faults:  # no plugin is imported under a policy that was not understood
            raise _refused(self.label, [*self.problems, *faults])
        if self.kernel is None or self.kernel.policy != policy:
            try:
                self.kernel = Kernel.start(policy)
            except NxdtError as error:
                key = "plugins.local" if isinstance(error, LocalPluginMissing) else "plugins.lock"
                place = (tree.origin(key) if "plugins" in tree else DEFAULT).at(key)
                raise _refused(self.label, [*self.problems, BadComponentChoice(**place, error=error)]) from None
        return self.kernel


def _collect(
    wanted: str | Path | Mapping[str, Any],
    overrides: Sequence[str],
    kernel: Kernel | None,
    label: str | None,
    *,
    converts: bool,
) -> _Written:
    """Return what a source, what it is based on and overrides write, merged.

    Args:
        wanted: The source.
        overrides: Over it.
        kernel: The one that was passed in.
        label: What errors call a mapping.
        converts: Whether files of other programs are read in keys of nxdt.

    Raises:
        ConfigError: there is nothing to check, since a text could not be read.
    """
    words: Sequence[Tree]
    words, unreadable = read_overrides(overrides)
    nothing = Tree({}, {(): COMMAND_LINE})
    label = (label or "mapping") if isinstance(wanted, Mapping) else str(wanted)
    written = _Written(tree=nothing, label=label, kernel=kernel, passed=kernel is not None)

    def kernel_for(above: Tree) -> Kernel:
        """Return the kernel that finds a recipe: under the policy of what is based on the recipe, which may block."""
        return written.start_kernel(_merged(above, words))

    source = read_source(wanted, partial(kernel_for, nothing), None, label)
    tree, seen, stem, faults = nothing, [label], source.stem, list[ConfigProblem]()
    while True:
        if converts and source.path is not None and not source.problems:
            try:
                finder = kernel_for(_merged(source.tree, [tree]))
            except ConfigError:  # a wrong section ``plugins``, which is reported with all other problems
                pass
            else:
                source, words, unread, notes = converted(source, words, finder)
                written.unread |= unread
                written.notes += notes
        faults += source.problems
        written.layers.append((source.tree, tree))
        tree = _merged(source.tree, [tree])
        stem = stem or source.stem
        tree.remove(BASE)
        if not source.readable or source.tree.get(BASE) is None:
            readable = source.readable
            break
        try:
            named = find_base(source.tree, seen)
        except ConfigProblem as problem:
            faults.append(problem)
            readable = False
            break
        seen.append(named)
        place = source.tree.origin(BASE).at(BASE)
        source = read_source(named, partial(kernel_for, tree), place)
    written.problems += faults
    above = _merged(nothing, words)
    written.layers.append((tree, above))
    tree = written.tree = _merged(tree, words)
    written.problems += unreadable
    if above.get(BASE) is not None:
        reason = "a base is read with the file that names it, and overrides come later"
        fault = NotSupported(**above.origin(BASE).at(BASE), found=above.describe(BASE), reason=reason, allowed="null")
        written.problems.append(fault)
    written.mandatory = {path: tree.origins[path] for path, value in tree.leaves() if value == MANDATORY}
    for path in written.mandatory:
        tree.remove(path)
    references = [path for path in sections_of(RunConfig) if has_interpolation(tree.get(path))]
    written.problems += interpolate(tree, wanted=references) if references else ()
    for slot in SLOTS:  # `section: name` is short for `section: {name: …}`
        name = tree.get(slot.section)
        if isinstance(name, str):
            origin, shown = tree.origin(slot.section), tree.shown_at(slot.section)
            tree.set(slot.section, {}, origin)
            tree.set(slot.key, name, origin, shown)
    if stem and "name" not in tree:
        tree.set("name", stem, replace(DEFAULT, where="of the file's name"))
    if not readable:
        raise _refused(written.label, written.problems)
    return written


def _merged(tree: Tree, above: Iterable[Tree]) -> Tree:
    """Return a tree with others merged over it."""
    merged = tree.copy()
    for layer in above:
        merged.merge(layer)
    return merged


def _refused(label: str, problems: Iterable[ConfigProblem]) -> ConfigError:
    """Return one error of all problems: by line of the file first, then those of the command line and of defaults.

    Args:
        label: What the user named.
        problems: In any order; the first of each line and key counts.
    """
    misfits: dict[str, list[Misfit]] = {}
    for problem in problems:
        hide_secrets_in(problem)
        if isinstance(problem, ImpossibleCombination) and problem.cause:
            misfits.setdefault(problem.cause.of, []).append(problem.cause)
    distinct: dict[tuple[str, str, str], ConfigProblem] = {}
    for problem in problems:
        if isinstance(problem, ImpossibleCombination) and problem.cause and len(misfits[problem.cause.of]) > 1:
            group = misfits[problem.cause.of]  # one problem of values that one other value does not divide
            fitting = math.gcd(*(misfit.number for misfit in group))
            values = ", ".join(f"{name} {number}" for name, number in {m.name: m.number for m in group}.items())
            remedy = f"Set it to {fitting} or a divisor of it" if fitting > 1 else "Set it to 1"
            reason, advice = f"{group[0].divisor} fits none of {values}", f"{remedy}, or change those values."
            problem = ImpossibleCombination(**group[0].place, reason=reason, advice=advice)
        distinct.setdefault((problem.place, problem.key, problem.row()), problem)
    if not distinct:
        raise RuntimeError(f"{label} was refused without a problem that says why: {problems}")
    ordered = sorted(distinct.values(), key=lambda problem: (problem.line == 0, problem.line))
    return ConfigError(source=label, problems=tuple(ordered))


def _select(
    tree: Tree, keys: Keys, kernel: Kernel, label: str, problems: list[ConfigProblem], *, published: bool
) -> tuple[dict[str, RegisteredComponent | None], list[str]]:
    """Return the component of every slot by its kind, without those that are unavailable, and notes on choices that
    follow from rules.

    Names that follow from rules are added to the tree, the values of ``model.model_config``, and the defaults of a run
    that starts from a published model.

    Args:
        tree: What was written.
        keys: Gets what the components declare.
        kernel: Knows the components.
        label: Place of problems with keys that are not written anywhere.
        problems: Gets what is wrong with the choices.
        published: Whether the run starts from a published model.
    """
    view = tree
    if any(interpolations(tree.data)):
        view = tree.copy()
        fill(view, RunConfig)
        whole = () if "model.name" in tree else ("model",)  # a model without a name is sought by its whole section
        interpolate(view, wanted=(*(slot.key for slot in SLOTS), *_RULE_KEYS, *whole))
    hf = read_hf_config(view)
    components, notes = dict[str, RegisteredComponent | None](), list[str]()
    for slot in SLOTS:
        around = slot.section.split(".")
        sections = [tree.get(tuple(around[: depth + 1])) for depth in range(len(around))]
        name = view.get(slot.key)
        name = _default(slot) if name is None else name
        mappings = all(isinstance(section, (dict, type(None))) for section in sections)
        if not mappings or not isinstance(name, (str, type(None))):
            keys.open.add(slot.section)  # reported when it is read
            continue
        key, why = slot.key, ""
        if key not in tree and slot.kind == "store" and "checkpoint.uri" in tree:
            key = "checkpoint.uri"
        origin = tree.origin(key) if key in tree or slot.section in tree else Origin(kind="file", where=label)
        try:
            if slot.kind == "store":
                uri = view.get("checkpoint.uri")
                scheme = uri.partition("://")[0] if isinstance(uri, str) and "://" in uri else "file"
                kernel.registry.check_scheme(scheme)
            if name is None and slot.kind == "dataset":
                name, why = "hf-data", _BY_DEFAULT
            elif name is None and slot.kind == "tokenizer":
                if any(view.get(f"data.tokenizer.{key}") is not None for key in ("type", "model")):
                    name, why = "huggingface", "data.tokenizer.type"
            elif name is None and slot.kind == "model":
                name, why = _model_of(architectures_of(hf.values), kernel)
            component = None
            if name is not None:
                component = kernel.registry.get(slot.kind, name)
            elif slot.kind == "store":
                component = kernel.registry.storage_for_scheme(scheme)
            components[slot.kind] = component
            place = tree.origin(slot.key).at(slot.key)
            if component is not None and (cls := usable_class(component, place)) is not None:
                keys.classes[slot.section] = cls
        except NxdtError as error:
            note = f" The name follows from {why}." if why else ""
            choice = BadComponentChoice(**origin.at(key), error=error, note=note)
            problems.append(error if isinstance(error, BadComponentConfig) else choice)
            keys.open.add(slot.section)
        if why:
            tree.set(slot.key, name, replace(DEFAULT, where="" if why == _BY_DEFAULT else f"by {why}"))
            if slot.kind == "model" and not published:
                notes.append(f"{slot.key}: not given; {name!r} follows from {why}")
    faults = merge_hf_values(tree, keys.classes.get("model"), hf)
    problems += faults
    keys.unfilled = keys.classes["model"] if faults else None
    if published:
        notes += fill_recipe(tree, hf)
    return components, notes


def _model_of(architectures: Sequence[str], kernel: Kernel) -> tuple[str, str]:
    """Return the model that reads the architectures of a ``config.json``, and why it is taken."""
    if not architectures:
        return "llama", _BY_DEFAULT
    readers = kernel.registry.readers(architectures)
    if len(readers) > 1:
        raise AmbiguousComponent(
            kind="model",
            name=architectures[0],
            offers=tuple(component.qualified_name for component in readers),
            dists=tuple(f"{component.dist} {component.version}" for component in readers),
        )
    name = readers[0].record.name if readers else reading_model(architectures[0]) or "hf"
    return name, f"model.model_config ({architectures[0]})"


def _drop_replaced(tree: Tree, layers: Iterable[tuple[Tree, Tree]], kernel: Kernel) -> list[str]:
    """Take keys out of the tree that only a component declares which something above its source replaces.

    Keys of the core, those that both components declare, and those that are given above, stay.

    Returns:
        A note for each component whose keys were dropped.
    """
    notes = []
    for (low, high), slot in product(layers, SLOTS):
        before, after = _name(low, slot) or _IMPLIED.get(slot.kind) or _default(slot), _name(high, slot)
        below, above = low.get(slot.section), high.get(slot.section)
        if before is None or after is None or before == after or not isinstance(below, dict):
            continue
        try:
            old, new = _declared(slot, before, kernel), _declared(slot, after, kernel)
        except NxdtError:  # one of them is unavailable, which is reported where it is selected
            continue
        staying = {*new, *keys_of(sections_of(RunConfig)[slot.section])}
        if isinstance(above, dict):
            staying |= {key for key, value in above.items() if value is not None}
        dropped = [key for key in below if key in old and key not in staying]
        for key in dropped:
            tree.remove(join(slot.section, key))
        if dropped:
            names = ", ".join(dropped)
            notes.append(f"{slot.key}: {after!r} replaces {before!r}, whose keys are left out: {names}")
    return notes


def _name(tree: Tree, slot: Slot) -> str | None:
    """The name that a source gives, or of a store the scheme of its address, with ``://``."""
    name, uri = tree.get(slot.key), tree.get("checkpoint.uri")
    if name is None and slot.kind == "store" and isinstance(uri, str):
        scheme, separator, _ = uri.partition("://")
        return f"{scheme}://" if separator else _FILE
    return name if isinstance(name, str) else None


def _default(slot: Slot) -> str | None:
    """Return the name that the core's section has by default."""
    default = keys_of(sections_of(RunConfig)[slot.section])[slot.selector].default
    return default if isinstance(default, str) else None


def _declared(slot: Slot, name: str, kernel: Kernel) -> Mapping[str, Key]:
    """Return the keys of a component, which may be named by the scheme that it serves.

    Raises:
        NxdtError: it is unavailable.
    """
    if name.endswith("://"):
        component = kernel.registry.storage_for_scheme(name.removesuffix("://"))
    else:
        component = kernel.registry.get(slot.kind, name)
    cls = component.load_config()
    return keys_of(cls) if cls is not None else {}


def _mask_options(tree: Tree, kernel: Kernel) -> None:
    """Mask the secrets among the options of loggers and callbacks, selected or not."""
    places = [(f"exp_manager.{options}", logger) for logger, options in _FLAGS.items()]
    for path in (_LOGGERS, _CALLBACKS):
        places += [(where, name) for where, _, name in _entries(tree, path)]
    for where, name in places:
        if isinstance(tree.get(where), dict) and isinstance(name, str):
            with suppress(NxdtError):  # of a component that cannot be had, which :func:`_select_extensions` reports
                cls = kernel.registry.get("callback", name).load_config()
                if cls is not None:
                    mask_secrets(tree, cls, parts_of(where))


def _entries(tree: Tree, path: str) -> Iterator[tuple[str, str, Any]]:
    """Yield the path of each item of a list, the key that names its component, and the name."""
    items = tree.get(path)
    for number, item in enumerate(items if isinstance(items, list) else ()):
        where = f"{path}[{number}]"
        key = where if isinstance(item, str) else f"{where}.name"
        yield where, key, tree.get(key)


def _select_extensions(
    tree: Tree, kernel: Kernel, problems: list[ConfigProblem]
) -> tuple[dict[str, tuple[Selected, ...]], list[str]]:
    """Return the loggers and callbacks with their options, by key of their list, and notes; what is wrong with them is
    added to ``problems``.

    An entry is a name, or a mapping of ``name`` and options. The tree is complete and interpolated.
    """
    notes, extensions = list[str](), dict[str, tuple[Selected, ...]]()
    for path in (_LOGGERS, _CALLBACKS):
        entries: list[tuple[str, str, str]] = []  # name, the key that holds it, the path of its options
        for where, key, name in _entries(tree, path):
            place = tree.origin(key).at(key)
            if isinstance(name, str):
                entries.append((name, key, where))
            elif name is not None:  # `yes` is a boolean of YAML
                problems.append(WrongValue(**place, found=tree.describe(key), allowed="the component's name, a text"))
            elif isinstance(tree.get(where), dict):
                problems.append(MissingKey(**place, allowed="the component's name"))
        names = {name for name, _, _ in entries}
        for logger, options_name in _FLAGS.items() if path == _LOGGERS else ():
            key, options = f"exp_manager.create_{logger}_logger", f"exp_manager.{options_name}"
            flag = tree.get(key)
            if key not in tree or not isinstance(flag, (bool, type(None))):  # reported when it is read
                continue
            by_default = logger == "tensorboard" and tree.get(_LOGGERS) is None
            if (by_default if flag is None else flag) and logger not in names:
                entries.append((logger, key, options))
            elif flag is False and tree.origin(key).kind != "default" and logger in names:
                reason = f"{key} is false, and {_LOGGERS} names {logger!r}"
                place = tree.origin(key).at(key)
                problems.append(ImpossibleCombination(**place, reason=reason, advice="Keep one of the two."))
            elif tree.get(options):
                notes.append(f"{options}: no effect, since {key} does not select that logger")
        components: list[Selected] = []
        for name, key, options in entries:
            place = tree.origin(key).at(key)
            try:
                component = kernel.registry.get("callback", name)
                cls = usable_class(component, place)
            except NxdtError as error:
                problem = error if isinstance(error, ConfigProblem) else BadComponentChoice(**place, error=error)
                problems.append(problem)
                continue
            part = tree.copy(options)
            if not isinstance(part.data, dict):
                part = Tree({}, {(): tree.origin(key)})
            if key == f"{options}.name":
                part.remove("name")
            instance, faults = read_part(cls or Section, part, options)
            problems += faults
            components.append(Selected(component=component, config=cls and instance))
        extensions[path] = tuple(components)
    return extensions, notes
