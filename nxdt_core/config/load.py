"""From a source and overrides to a checked configuration, every problem on the way gathered into one report."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from nxdt_core.config.checks import Checked, find_impossible, find_notes, find_undeclared
from nxdt_core.config.components import (
    CALLBACKS,
    LOGGERS,
    Replaced,
    drop_replaced,
    find_replaced,
    mask_options,
    part_of,
    run_model,
    select,
    select_extensions,
    selected,
)
from nxdt_core.config.hub import begin
from nxdt_core.config.huggingface import with_published_model
from nxdt_core.config.read import MANDATORY, fill, has_interpolation, interpolate, read, read_part
from nxdt_core.config.schema import SLOTS, ExpManagerConfig, PluginsConfig, ResolvedConfig, RunConfig, Selected
from nxdt_core.config.secrets import hide_credentials, hide_secrets, mask_secrets, notes_on_secrets
from nxdt_core.config.section import ChecksItself, section_paths
from nxdt_core.config.sources import (
    BASE,
    COMMAND_LINE,
    Source,
    converted,
    explained,
    find_base,
    read_overrides,
    read_source,
)
from nxdt_core.config.tree import DEFAULT, KeyPath, Origin, Place, Tree, dotted, join, plain
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
)
from nxdt_core.errors.hub import HubError
from nxdt_core.errors.plugins import ComponentUnusable, LocalPluginMissing
from nxdt_core.kernel import Kernel, PluginPolicy, RegisteredComponent
from nxdt_core.kernel.hookspecs import ConfigDefaultsContext, ValidateConfigContext
from nxdt_core.kernel.plugin import LOCAL, plugin_notes

__all__ = ["check", "load"]


_NO_END = 2**31 - 1
"""Steps that no run takes."""


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
    return _Load(source, tuple(overrides), kernel, label).run()


def check(
    source: str | Path | Mapping[str, Any], overrides: Sequence[str] = (), *, kernel: Kernel | None = None
) -> tuple[ConfigProblem, ...]:
    """Return the problems that :func:`load` would raise; none where the configuration is good."""
    try:
        load(source, overrides, kernel=kernel)
    except ConfigError as error:
        return error.problems
    return ()


def start_kernel_of(source: str | Path, overrides: Sequence[str] = ()) -> Kernel:
    """Start a kernel under the section ``plugins`` of a configuration, which may be wrong in all others.

    Raises:
        ConfigError: the source cannot be read, or the section is wrong.
    """
    return _Load(source, tuple(overrides), None, None).kernel()


class _Load:
    """One load: what is known so far, and the problems so far."""

    def __init__(
        self,
        source: str | Path | Mapping[str, Any],
        overrides: tuple[str, ...],
        kernel: Kernel | None,
        label: str | None,
    ) -> None:
        self.wanted = source
        self.label = label
        self.overrides = overrides
        trees, self.unreadable = read_overrides(overrides)
        self.set: Sequence[Tree] = trees
        """The trees that overrides set, later ones over earlier ones."""
        self.unread: Mapping[KeyPath, str] = {}
        """Keys of another program that overrides set and that say nothing here, unless nxdt has them, too → why."""
        self.passed = kernel
        self.started: Kernel | None = None
        """The kernel in use; before it is known, one that was started to find a recipe."""
        self.problems: list[ConfigProblem] = []
        self.notes: list[str] = []
        self.replaced: list[Replaced] = []
        """Components that something above the source that names them replaces."""

    def run(self) -> ResolvedConfig:
        source = self._read(converts=True)
        tree, mandatory = self._collect(source)
        kernel = self._start_kernel(tree, source.label)
        for plugin in kernel.plugins if self.passed is None else ():  # a file was asked for by name
            if plugin.dist == LOCAL and plugin.state not in ("ok", "blocked"):
                message = f"the plugin file {plugin.location} is {plugin.state}: {plugin.reason}."
                correct = "Correct it, or take it out of plugins.local."
                advice = "Name one of the two." if plugin.state == "shadowed" else correct
                place = tree.origin("plugins.local").at("plugins.local")
                self.problems.append(ComponentFinding(**place, message=message, advice=advice))
        self.notes += drop_replaced(tree, self.replaced, kernel)
        self._keep_commits(tree)
        try:
            tree, published = with_published_model(tree)
        except HubError as error:  # what else is missing would come from that model
            start = "checkpoint.resume_from"
            self.problems.append(BadComponentChoice(**tree.origin(start).at(start), error=error))
            raise self._error(source.label) from None
        try:  # what the hook gives is below the rest; of several plugins the first wins
            defaults_context = ConfigDefaultsContext(config=plain(tree.data), source=source.label)
            for plugin, defaults in list(kernel.call("nxdt_config_defaults", context=defaults_context)):
                origin = Origin(kind="plugin", where=plugin.name)
                if isinstance(defaults, Mapping):
                    tree = _overridden(Tree.of(defaults, origin), [tree])
                    continue
                reason = f"nxdt_config_defaults gave a {type(defaults).__name__}, not a mapping"
                fault = BadComponentConfig(**origin.at(""), component=plugin.name, dist=plugin.dist, reason=reason)
                self.problems.append(fault)
        except NxdtError as error:
            self.problems.append(BadComponentChoice(**Origin(kind="plugin", where="").at(""), error=error))
        composition, problems = select(tree, kernel, source.label, published=published)
        model, faults = run_model(tree, composition)
        self.problems += [*problems, *faults]
        passes = tree.get("trainer.max_epochs")
        if tree.get("trainer.max_steps") is None and isinstance(passes, int) and passes > 0:  # which alone end it
            tree.set("trainer.max_steps", _NO_END, DEFAULT)

        keys = fill(tree, model)
        for path, note in self.unread.items():
            self.notes += () if path in keys.names else (note,)
            while path not in keys.names and not (isinstance(value := tree.get(path), dict) and value):
                tree.remove(path)
                path = path[:-1]
        self.problems += interpolate(tree, keys.known)
        mask_options(tree, kernel)
        for path, key in keys.leaves.items():
            mask_secrets(tree, key, path)
        self.problems += hide_credentials(tree)
        hide_secrets.learn(tree, references=False)
        reading = read(tree, model, keys, open_sections=composition.open, unfilled=composition.unfilled)
        self.problems += explained(reading.problems, tree, keys.known, kernel)
        for path, origin in mandatory.items():
            if path in tree and tree.origin(path).kind == "default":
                self.problems.append(MissingKey(**origin.at(dotted(path)), allowed=f"a value in place of {MANDATORY}"))
        extensions, problems, extension_notes = select_extensions(tree, kernel)
        self.problems += problems
        components = selected(composition, reading)
        checked = Checked(reading.values, tree)
        self.problems += find_problems(checked, components, kernel, asks_plugins=not self.problems)
        if self.problems or reading.instance is None:
            raise self._error(source.label, keys.followers)
        run = part_of(reading.instance, RunConfig)
        notes = (
            *self.notes,
            *composition.notes,
            *notes_on_secrets(tree),
            *find_notes(checked, composition),
            *extension_notes,
            *plugin_notes(kernel.plugins),
            *(f"plugins: no installed plugin is called {name!r}" for name in kernel.unmatched_policy()),
        )
        run_dir = run.exp_manager.run_dir
        return ResolvedConfig(
            run=run,
            kernel=kernel,
            components=components,
            loggers=extensions[LOGGERS],
            callbacks=extensions[CALLBACKS],
            source=source.label,
            overrides=self.overrides,
            run_dir=run_dir,
            checkpoint_uri=run.checkpoint.uri or str(run_dir / "checkpoints"),
            notes=tuple(map(hide_secrets, notes)),
            tree=tree,
        )

    def kernel(self) -> Kernel:
        source = self._read(converts=False)
        return self._start_kernel(self._collect(source)[0], source.label)

    def _kernel_for_recipes(self, above: Tree) -> Kernel:
        """The kernel that finds a recipe: under the policy, which may block plugins, of what is based on the recipe."""
        return self._start_kernel(_overridden(above, self.set), str(self.wanted))

    def _read(self, *, converts: bool) -> Source:
        """The source and, below it, what it is based on. ``converts`` reads files of other programs in keys of nxdt."""
        top = below = self._read_one(self.wanted, Tree({}, {(): COMMAND_LINE}), None, converts)
        tree, problems, seen, stem = top.tree.copy(), [*top.problems], [top.label], top.stem
        tree.remove(BASE)
        while below.readable and below.tree.get(BASE) is not None:
            named = find_base(below.tree, seen)
            if isinstance(named, ConfigProblem):
                return replace(top, problems=(*problems, named), readable=False)
            seen.append(named)
            below = self._read_one(named, tree, below.tree.origin(BASE).at(BASE), converts)
            stem = stem or below.stem
            problems += below.problems
            self.replaced += find_replaced(below.tree, tree)
            tree = _overridden(below.tree, [tree])
            tree.remove(BASE)
        return replace(top, tree=tree, problems=tuple(problems), readable=below.readable, stem=stem)

    def _read_one(
        self, wanted: str | Path | Mapping[str, Any], above: Tree, named: Place | None, converts: bool
    ) -> Source:
        source = read_source(wanted, partial(self._kernel_for_recipes, above), named, self.label)
        if not converts or source.path is None or source.problems:
            return source
        found = len(self.problems)
        try:
            kernel = self._kernel_for_recipes(_overridden(source.tree, [above]))
        except ConfigError:  # a wrong section ``plugins``, which is reported with all other problems
            del self.problems[found:]
            return source
        source, self.set, unread, notes = converted(source, self.set, kernel)
        self.unread = {**self.unread, **unread}
        self.notes += notes
        return source

    def _collect(self, source: Source) -> tuple[Tree, dict[KeyPath, Origin]]:
        """Return what was written, overrides included, and where the keys are that said ``???``."""
        self.problems += source.problems
        above = _overridden(Tree({}, {(): COMMAND_LINE}), self.set)
        self.replaced += find_replaced(source.tree, above)
        tree = _overridden(source.tree, self.set)
        self.problems += self.unreadable
        if above.get(BASE) is not None:
            reason = "a base is read with the file that names it, and overrides come later"
            place = above.origin(BASE).at(BASE)
            self.problems.append(NotSupported(**place, found=above.describe(BASE), reason=reason, allowed="null"))
        mandatory = {path: tree.origins[path] for path, value in tree.leaves() if value == MANDATORY}
        for path in mandatory:
            tree.remove(path)
        references = [path for path in section_paths(RunConfig) if has_interpolation(tree.get(path))]
        self.problems += interpolate(tree, wanted=references) if references else ()
        for slot in SLOTS:  # `section: name` is short for `section: {name: …}`
            name = tree.get(slot.section)
            if isinstance(name, str):
                origin, shown = tree.origin(slot.section), tree.shown_at(slot.section)
                tree.set(slot.section, {}, origin)
                tree.set(slot.key, name, origin, shown)
        if source.stem and "name" not in tree:
            tree.set("name", source.stem, replace(DEFAULT, where="of the file's name"))
        if not source.readable:
            raise self._error(source.label)
        return tree, mandatory

    def _start_kernel(self, tree: Tree, label: str) -> Kernel:
        """The kernel that was passed in, else one under the policy of ``tree``."""
        if self.passed is not None:
            return self.passed
        resolved = tree.copy()
        faults = interpolate(resolved, wanted=("plugins",))
        policy = PluginPolicy()
        if resolved.get("plugins") is not None:
            section, wrong = read_part(PluginsConfig, resolved.copy("plugins"), "plugins")
            faults += wrong
            policy = PluginPolicy(**section.model_dump(exclude={"on_resume"})) if section is not None else policy
        if faults:  # no plugin is imported under a policy that was not understood
            self.problems += faults
            raise self._error(label)
        if self.started is not None and self.started.policy == policy:
            return self.started
        try:
            self.started = Kernel.start(policy)
        except NxdtError as error:
            key = "plugins.local" if isinstance(error, LocalPluginMissing) else "plugins.lock"
            place = (tree.origin(key) if "plugins" in tree else DEFAULT).at(key)
            self.problems.append(BadComponentChoice(**place, error=error))
            raise self._error(label) from None
        return self.started

    def _keep_commits(self, tree: Tree) -> None:
        """Let a run that resumes read the commits of the Hugging Face hub that it began with."""
        view, key, manager = tree.copy(), "checkpoint.resume_if_exists", None
        interpolate(view, wanted=("name", "exp_manager", key))
        if view.get(key) is True and isinstance(given := view.get("exp_manager", {}), dict):
            manager, _ = read_part(ExpManagerConfig, {"name": view.get("name"), **given})
        begin(None if manager is None else manager.run_dir / "config.yaml")

    def _error(self, label: str, followers: Mapping[str, str] | None = None) -> ConfigError:
        """Return one error of all problems: by line of the file first, then those of the command line and of defaults.

        Args:
            label: What the user named.
            followers: Key → key that it takes its value from; where both have a problem, the latter is reported.
        """
        misfits: dict[str, list[Misfit]] = {}
        for problem in self.problems:
            hide_secrets.redact_error(problem)
            if isinstance(problem, ImpossibleCombination) and problem.cause:
                misfits.setdefault(problem.cause.of, []).append(problem.cause)
        keys = {problem.key for problem in self.problems}
        distinct: dict[tuple[str, str, str], ConfigProblem] = {}
        for problem in self.problems:
            if isinstance(problem, ImpossibleCombination) and problem.cause and len(misfits[problem.cause.of]) > 1:
                group = misfits[problem.cause.of]  # one problem of values that one other value does not divide
                fitting = math.gcd(*(misfit.number for misfit in group))
                values = ", ".join(f"{name} {number}" for name, number in {m.name: m.number for m in group}.items())
                own = f"Set it to {fitting} or a divisor of it" if fitting > 1 else "Set it to 1"
                reason, advice = f"{group[0].divisor} fits none of {values}", f"{own}, or change those values."
                problem = ImpossibleCombination(**group[0].place, reason=reason, advice=advice)
            if (followers or {}).get(problem.key) not in keys:
                distinct.setdefault((problem.place, problem.key, problem.row()), problem)
        if not distinct:
            raise RuntimeError(f"{label} was refused without a problem that says why: {self.problems}")
        ordered = sorted(distinct.values(), key=lambda problem: (problem.line == 0, problem.line))
        return ConfigError(source=label, problems=tuple(ordered))


def _overridden(tree: Tree, above: Iterable[Tree]) -> Tree:
    """Return a tree with others merged over it."""
    found = tree.copy()
    for each in above:
        found.merge(each)
    return found


def find_problems(
    checked: Checked, components: Mapping[str, Selected | None], kernel: Kernel, *, asks_plugins: bool
) -> list[ConfigProblem]:
    """Return the problems that the rules of the core, of the components and of plugins find in values that are right.

    Args:
        checked: The values.
        components: Those that are selected, by kind.
        kernel: Knows who declares what.
        asks_plugins: Whether to call the hook ``nxdt_validate_config``, which expects a configuration of right types.
    """
    precision = components.get("precision")
    if precision is not None:
        with suppress(Exception, SystemExit):  # what fails here fails again, with its traceback, in a run
            checked = replace(checked, policy=precision.component.load_target()(precision.config))
    problems = list(find_impossible(checked, components))
    engine = components.get("engine")
    if engine is not None:
        with _guarded(engine.component, checked.place("parallel_engine.name"), "rules", problems):
            rules = engine.component.load_rules()
            problems.extend(() if rules is None else rules(checked))
    problems += find_undeclared(checked, components, kernel.registry)
    for slot in SLOTS:
        selected = components.get(slot.kind)
        if selected is not None and isinstance(selected.config, ChecksItself):
            with _guarded(selected.component, checked.place(slot.section), "check", problems):
                for key, message in selected.config.check():
                    end = "" if message.endswith((".", "!", "?")) else "."
                    place = checked.place(join(slot.section, key))
                    problems.append(ComponentFinding(**place, message=f"{message}{end}"))
    if not asks_plugins:
        return problems
    names = {kind: found.component.qualified_name for kind, found in components.items() if found is not None}
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
