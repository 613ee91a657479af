"""From a source and overrides to a checked configuration, every problem on the way gathered into one report."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce
from pathlib import Path
from typing import Any

from nxdt_core.config.capabilities import find_undeclared
from nxdt_core.config.checks import Checked, find_impossible, find_notes
from nxdt_core.config.complete import Completion, find_ungiven, merge_plugin_defaults, tidy_given
from nxdt_core.config.components import Replaced, Selection, drop_replaced, find_replaced, selecting_keys
from nxdt_core.config.huggingface import merge_hf_values, read_hf_config
from nxdt_core.config.interpolation import interpolate
from nxdt_core.config.migration import converted, explained
from nxdt_core.config.plugins import (
    Extensions,
    component_findings,
    engine_findings,
    option_sections,
    plugin_findings,
    read_policy,
    start_problem,
    unusable_files,
)
from nxdt_core.config.read import Reading
from nxdt_core.config.schema import Composition, ResolvedConfig, RunConfig, Selected
from nxdt_core.config.secrets import describe_node, hide_credentials, hide_secrets, mask_fields, notes_on_secrets
from nxdt_core.config.sources import BASE, COMMAND_LINE, Source, find_base, read_overrides, read_source
from nxdt_core.config.tree import Node, Origin, Place, merge
from nxdt_core.errors import NxdtError
from nxdt_core.errors.configuration import ConfigError, ConfigProblem, ImpossibleCombination, Misfit, NotSupported
from nxdt_core.kernel import Kernel, PluginPolicy
from nxdt_core.kernel.plugin import plugin_notes

__all__ = ["check", "error_report", "load"]


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
        overrides: ``key.path=value`` each, over the source.
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
        self.set, self.unreadable = read_overrides(overrides)
        """The trees that overrides set, later ones over earlier ones, and what is wrong with others."""
        self.passed = kernel
        self.started: Kernel | None = None
        """The kernel in use; before it is known, one that was started to find a recipe."""
        self.problems: list[ConfigProblem] = []
        self.mandatory: Mapping[str, Origin] = {}
        self.reading: Reading | None = None
        self.notes: list[str] = []
        self.replaced: list[Replaced] = []
        """Components that something above the source that names them replaces."""

    def run(self) -> ResolvedConfig:
        source = self._read(converts=True)
        given = self._collect(source)
        kernel = self._start_kernel(given, source.label)
        self.problems += unusable_files(kernel, given) if self.passed is None else ()
        given, dropped = drop_replaced(given, self.replaced, kernel)
        self.notes += dropped
        given = self._keep(merge_plugin_defaults(given, source.label, kernel))
        given, composition = self._compose(given, kernel, source.label)
        passes = given.plain("trainer.max_epochs")
        if given.plain("trainer.max_steps") is None and isinstance(passes, int) and passes > 0:  # which alone end it
            given = given.set("trainer.max_steps", Node(_NO_END, Origin(kind="default", where="")))
        completion = Completion(given, composition)
        filled = self._keep(interpolate(completion.tree, completion.known))
        filled = self._hide(filled, composition, kernel)
        reading = self.reading = Reading(filled, composition, completion.known)
        run = reading.read(RunConfig, filled, "")
        self.problems += explained(reading.problems, completion.known, kernel)
        self.problems += find_ungiven(self.mandatory, reading.tree)
        extensions = Extensions(reading.tree, kernel)
        self.problems += extensions.problems
        checked, components = Checked(reading.values, reading.tree), composition.selected(reading.instances)
        self._validate(checked, components, kernel)
        if self.problems or run is None:
            raise self._error(source.label)
        notes = (
            *self.notes,
            *notes_on_secrets(reading.tree),
            *find_notes(checked, composition),
            *extensions.notes,
            *plugin_notes(kernel.plugins),
            *(f"plugins: no installed plugin is called {name!r}" for name in kernel.unmatched_policy()),
        )
        run_dir = run.exp_manager.run_dir
        return ResolvedConfig(
            run=run,
            kernel=kernel,
            components=components,
            loggers=extensions.loggers,
            callbacks=extensions.callbacks,
            origins={path: node.origin for path, node in reading.tree.leaf_nodes()},
            source=source.label,
            overrides=self.overrides,
            run_dir=run_dir,
            checkpoint_uri=run.checkpoint.uri or str(run_dir / "checkpoints"),
            notes=tuple(map(hide_secrets, notes)),
            tree=reading.tree,
        )

    def kernel(self) -> Kernel:
        source = self._read(converts=False)
        return self._start_kernel(self._collect(source), source.label)

    def _keep(self, outcome: tuple[Node, list[ConfigProblem]]) -> Node:
        """Take the tree of a step and note its problems."""
        tree, problems = outcome
        self.problems += problems
        return tree

    def _kernel_for_recipes(self, above: Node) -> Kernel:
        """The kernel that finds a recipe: under the policy, which may block plugins, of what is based on the recipe."""
        return self._start_kernel(reduce(merge, self.set, above), str(self.wanted))

    def _read(self, *, converts: bool) -> Source:
        """The source and, below it, what it is based on. ``converts`` reads files of other programs in keys of nxdt."""
        top = below = self._read_one(self.wanted, Node({}, COMMAND_LINE), None, converts)
        tree, problems, seen, stem = top.tree.without(BASE), [*top.problems], [top.label], top.stem
        while below.readable and (node := below.tree.find(BASE)) is not None and node.value is not None:
            named = find_base(node, seen)
            if isinstance(named, ConfigProblem):
                return replace(top, problems=(*problems, named), readable=False)
            seen.append(named)
            below = self._read_one(named, tree, node.origin.at(BASE), converts)
            stem = stem or below.stem
            problems += below.problems
            self.replaced += find_replaced(below.tree, tree)
            tree = merge(below.tree.without(BASE), tree)
        return replace(top, tree=tree, problems=tuple(problems), readable=below.readable, stem=stem)

    def _read_one(
        self, wanted: str | Path | Mapping[str, Any], above: Node, named: Place | None, converts: bool
    ) -> Source:
        source = read_source(wanted, partial(self._kernel_for_recipes, above), named, self.label)
        if not converts or source.path is None or source.problems:
            return source
        found = len(self.problems)
        try:
            kernel = self._kernel_for_recipes(merge(source.tree, above))
        except ConfigError:  # a wrong section ``plugins``, which is reported with all other problems
            del self.problems[found:]
            return source
        source, notes = converted(source, kernel)
        self.notes += notes
        return source

    def _collect(self, source: Source) -> Node:
        """What was written, overrides included."""
        self.problems += source.problems
        above = reduce(merge, self.set, Node({}, COMMAND_LINE))
        self.replaced += find_replaced(source.tree, above)
        given = reduce(merge, self.set, source.tree)
        self.problems += self.unreadable
        if (base := above.find(BASE)) is not None and base.value is not None:
            reason = "a base is read with the file that names it, and overrides come later"
            place = base.origin.at(BASE)
            self.problems.append(NotSupported(**place, found=describe_node(base), reason=reason, allowed="null"))
        given, problems, self.mandatory = tidy_given(given)
        self.problems += problems
        if source.stem and given.find("name") is None:
            given = given.set("name", Node(source.stem, Origin(kind="default", where="of the file's name")))
        if not source.readable:
            raise self._error(source.label)
        return given

    def _start_kernel(self, given: Node, label: str) -> Kernel:
        """The kernel that was passed in, else one under the policy of ``given``."""
        if self.passed is not None:
            return self.passed
        policy = read_policy(given)
        if not isinstance(policy, PluginPolicy):
            self.problems += policy
            raise self._error(label)
        if self.started is not None and self.started.policy == policy:
            return self.started
        try:
            self.started = Kernel.start(policy)
        except NxdtError as error:
            self.problems.append(start_problem(given, error))
            raise self._error(label) from None
        return self.started

    def _compose(self, given: Node, kernel: Kernel, label: str) -> tuple[Node, Composition]:
        """Select components and take in the keys that they declare."""
        view, _ = interpolate(Completion(given, Composition()).tree, wanted=selecting_keys(given))
        hf = read_hf_config(view)
        selection = Selection(given, view, kernel, hf.values, Origin(kind="file", where=label))
        self.problems += selection.problems
        self.notes += selection.notes
        merged, problems = merge_hf_values(selection.tree, selection.composition, hf)
        self.problems += problems
        if problems:
            selection.composition.unfilled.add("model")
        return merged, selection.composition

    def _hide(self, filled: Node, composition: Composition, kernel: Kernel) -> Node:
        """The tree with what is shown in place of secrets."""
        sections = ((tuple(section.split(".")), cls) for section, cls in composition.classes.items())
        hidden = self._keep(hide_credentials(mask_fields(filled, [*sections, *option_sections(filled, kernel)])))
        hide_secrets.learn(hidden, references=False)
        return hidden

    def _validate(self, checked: Checked, components: Mapping[str, Selected | None], kernel: Kernel) -> None:
        """Rules over the values; plugins are asked only where every type is right."""
        right = not self.problems
        self.problems += find_impossible(checked, components)
        self.problems += engine_findings(checked, components)
        self.problems += find_undeclared(checked, components, kernel.registry)
        self.problems += component_findings(checked, components)
        if right:
            self.problems += plugin_findings(checked, components, kernel)

    def _error(self, label: str) -> ConfigError:
        followers = self.reading.followers if self.reading is not None else {}
        for problem in self.problems:
            hide_secrets.redact_error(problem)
        return error_report(label, self.problems, followers)


def error_report(label: str, problems: Iterable[ConfigProblem], followers: Mapping[str, str]) -> ConfigError:
    """Return one error of all problems: by line of the file first, then those of the command line and of defaults.

    Args:
        label: What the user named.
        problems: In the order in which they were found.
        followers: Key → key that it takes its value from.
    """
    found = list(_one_per_cause(problems))
    keys = {problem.key for problem in found}
    kept: dict[tuple[str, str, str], ConfigProblem] = {}
    for problem in found:
        if followers.get(problem.key) not in keys:
            kept.setdefault((problem.place, problem.key, problem.row()), problem)
    if not kept:
        raise RuntimeError(f"{label} was refused without a problem that says why: {found}")
    ordered = sorted(kept.values(), key=lambda problem: (problem.line == 0, problem.line))
    return ConfigError(source=label, problems=tuple(ordered))


def _one_per_cause(problems: Iterable[ConfigProblem]) -> Iterator[ConfigProblem]:
    """Yield the problems; those of values that one other value does not divide become one, in place of the first."""
    found = list(problems)
    sharing: dict[str, list[Misfit]] = {}
    for problem in found:
        if isinstance(problem, ImpossibleCombination) and problem.cause:
            sharing.setdefault(problem.cause.of, []).append(problem.cause)
    for problem in found:
        cause = problem.cause if isinstance(problem, ImpossibleCombination) else None
        if cause is None or len(sharing[cause.of]) == 1:
            yield problem
        elif cause is sharing[cause.of][0]:
            yield _merged(sharing[cause.of])


def _merged(misfits: Sequence[Misfit]) -> ImpossibleCombination:
    first = misfits[0]
    numbers = {each.name: each.number for each in misfits}
    fitting = math.gcd(*numbers.values())
    values = ", ".join(f"{name} {number}" for name, number in numbers.items())
    return ImpossibleCombination(
        **first.place,
        reason=f"{first.divisor} fits none of {values}",
        advice=f"Set it to {fitting} or a divisor of it, or change those values."
        if fitting > 1
        else "Set it to 1, or change those values.",
    )
