"""Errors of the kernel and of plugins: codes ``NXDT-K…``."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

from nxdt_core.errors.base import NxdtError, either, listing, one_of

__all__ = [
    "AmbiguousComponent",
    "BadComponentRecord",
    "ComponentUnusable",
    "KitsMissing",
    "LocalPluginMissing",
    "PipMissing",
    "PluginHookFailed",
    "PluginLockMismatch",
    "PluginLockUnreadable",
    "PluginLockUnwritable",
    "PluginsUnusable",
    "SchemeNotAllowed",
    "UnknownComponent",
    "UnknownErrorCode",
    "UnknownKind",
    "UnknownPlugin",
    "UnknownScheme",
]

_LOCAL = "local"
"""What stands for the distribution of a plugin file."""


class BadComponentRecord(NxdtError):
    """A record that a plugin yields is malformed."""

    code = "NXDT-K001"
    happened = "{record}.{field} cannot be {found!r}."
    remedy = "Write {field} as {wanted}."
    record: str
    field: str
    found: object

    def _view(self) -> dict[str, Any]:
        forms = {
            "name": "letters, digits and '_ . + -', starting with a letter or digit",
            **dict.fromkeys(("capabilities", "requires", "requires_of_model"), "a frozenset of names"),
        }
        return {**super()._view(), "wanted": forms.get(self.field, "'package.module:attribute'")}


class UnknownComponent(NxdtError):
    """A configuration names a component that no usable plugin offers."""

    code = "NXDT-K002"
    happened = "No {kind} is called {name!r} ({section}).{bad}"
    remedy = "{advice}"
    usual_remedy = "Choose an available name, or install the distribution that the message names."
    kind: str
    name: str
    section: str
    """Key of the configuration that selects the kind."""
    close: tuple[str, ...] = ()
    available: tuple[str, ...] = ()
    unusable: tuple[str, ...] = ()
    """One sentence for each installed plugin that cannot be used and might have offered it."""
    install: str | None = None
    """Distribution that is known to offer it and is not installed."""

    def _view(self) -> dict[str, Any]:
        kind = self.kind.replace("_", " ")
        return {**super()._view(), "kind": kind, "bad": _unusable(self.unusable), "advice": self._advice()}

    def _advice(self) -> str:
        ways = []
        if self.install:
            ways.append(f"Install it: pip install {self.install}.")
        if self.close:
            ways.append(f"Did you mean {one_of(self.close)}?")
        ways += _amends(self.unusable)
        if self.available:
            ways.append(f"Available: {listing(self.available)}.")
        elif not self.unusable:
            ways.append("No plugin offers any.")
        return " ".join(ways)


class AmbiguousComponent(NxdtError):
    """Several plugins offer one short name."""

    code = "NXDT-K003"
    happened = "The {kind} {name!r} is offered by several plugins: {by}."
    remedy = "Write {written}, or name the plugin that is meant in plugins.prefer."
    kind: str
    name: str
    offers: tuple[str, ...]
    """Each as ``plugin:name``."""
    dists: tuple[str, ...]
    """Distribution and version of each offer."""

    def _view(self) -> dict[str, Any]:
        written = one_of(self.offers)
        by = " and ".join(map(_offerer, self.dists, self.offers))
        return {**super()._view(), "by": by, "written": written}


class UnknownKind(NxdtError):
    """Code or a command asks for a kind of component that does not exist."""

    code = "NXDT-K004"
    happened = "There is no kind of component called {kind!r}."
    remedy = "{hint}The kinds are {kinds}."
    kind: str
    close: tuple[str, ...]
    available: tuple[str, ...]

    def _view(self) -> dict[str, Any]:
        hint = f"Did you mean {one_of(self.close)}? " if self.close else ""
        return {**super()._view(), "hint": hint, "kinds": listing(self.available, limit=20)}


class UnknownScheme(NxdtError):
    """No usable plugin stores checkpoints at addresses of a scheme."""

    code = "NXDT-K005"
    happened = "No plugin stores checkpoints at {scheme}:// addresses.{bad}"
    remedy = "{hint}Use a plain path, or an address that begins with {schemes}."
    scheme: str
    available: tuple[str, ...]
    unusable: tuple[str, ...] = ()
    install: str | None = None

    def _view(self) -> dict[str, Any]:
        hint = f"Install the plugin: pip install {self.install}. " if self.install else ""
        schemes = either([f"{name}://" for name in self.available]) if self.available else "no scheme"
        return {**super()._view(), "bad": _unusable(self.unusable), "hint": hint, "schemes": schemes}


class ComponentUnusable(NxdtError):
    """A registered component's implementation or configuration class cannot be imported."""

    code = "NXDT-K006"
    happened = "The {kind} {name!r} of {dist} cannot be used: {reason}."
    remedy = "{advice}; its record gives {field}={reference!r}."
    usual_remedy = "Install what its import lacks, or report it to the plugin's author."
    kind: str
    name: str
    plugin: str
    dist: str
    field: str
    """``target`` or ``config``: which reference of the record failed."""
    reference: str
    reason: str

    def _view(self) -> dict[str, Any]:
        advice = f"Repair or reinstall {self.dist}"
        if self.dist == _LOCAL:
            own = f"{self.field}=f'{{__name__}}:Name'"
            absent = self.reason.endswith("does not exist")
            advice = f"In a local plugin file write {own}" if absent else "Correct the file in plugins.local"
        return {**super()._view(), "advice": advice}


class PluginHookFailed(NxdtError):
    """A plugin's hook raised where its result is needed."""

    code = "NXDT-K007"
    happened = "The plugin {plugin!r} ({dist}) failed: {hook} {reason}."
    remedy = "Report it to the plugin's authors, or leave the plugin out with plugins.block=[{plugin}]."
    plugin: str
    dist: str
    hook: str
    reason: str


class PluginsUnusable(NxdtError):
    """Strict mode: an installed plugin cannot be used."""

    code = "NXDT-K008"
    happened = "Installed plugins cannot be used: {list}."
    remedy = "Repair, upgrade or remove them, or name them in plugins.block."
    problems: tuple[str, ...]

    def _view(self) -> dict[str, Any]:
        return {**super()._view(), "list": "; ".join(self.problems)}


class PluginLockMismatch(NxdtError):
    """The installed plugins are not those of the lock file."""

    code = "NXDT-K009"
    happened = "The plugins are not those of {path}: {list}."
    remedy = "Install what the lock file names, or write it again with nxdt plugins lock."
    path: str
    differences: tuple[str, ...]

    def _view(self) -> dict[str, Any]:
        return {**super()._view(), "list": "; ".join(self.differences)}


class PluginLockUnreadable(NxdtError):
    """A lock file is missing or malformed."""

    code = "NXDT-K010"
    happened = "The lock file {path} cannot be read: {reason}."
    remedy = "Correct plugins.lock, or write the file with nxdt plugins lock."
    path: str
    reason: str


class LocalPluginMissing(NxdtError):
    """The configuration names a plugin file that does not exist."""

    code = "NXDT-K011"
    happened = "There is no plugin file {path}."
    remedy = "Correct plugins.local; relative paths are taken from the directory of the configuration file."
    path: str


class KitsMissing(NxdtError):
    """The conformance kits are asked for where they are not installed."""

    code = "NXDT-K030"
    happened = "The kits that check {name!r} are not installed."
    remedy = "Install it: pip install nxdt-testing."
    name: str


class PipMissing(NxdtError):
    """The index is asked for where pip is not installed."""

    code = "NXDT-K031"
    happened = "{python} has no pip, which knows the package index."
    remedy = "Install it: python -m ensurepip; or compare the versions of nxdt plugins list with your index."
    python: str


class SchemeNotAllowed(NxdtError):
    """An address of checkpoints has a scheme that the configuration does not allow."""

    code = "NXDT-K033"
    happened = "plugins.schemes does not allow addresses with '{scheme}://'; a plain path has the scheme 'file'."
    remedy = "Allowed are {listed}: correct the address, or add '{scheme}' to plugins.schemes."
    scheme: str
    allowed: tuple[str, ...]

    def _view(self) -> dict[str, Any]:
        return {**super()._view(), "listed": listing(self.allowed)}


class PluginLockUnwritable(NxdtError):
    """The lock file cannot be written."""

    code = "NXDT-K034"
    happened = "The lock file {path} cannot be written: {reason}."
    remedy = "Name a file in a directory that you can write to."
    path: str
    reason: str


def _amends(unusable: tuple[str, ...]) -> list[str]:
    """What to do about plugins that cannot be used: the configuration blocks some, others are faulty."""
    ways = []
    if any(sentence.endswith("is blocked: named in plugins.block") for sentence in unusable):
        ways.append("Take it out of plugins.block.")
    if any(sentence.endswith("is blocked: not named in plugins.allow") for sentence in unusable):
        ways.append("Name it in plugins.allow.")
    if any(" is blocked: " not in sentence for sentence in unusable):
        ways.append("Fix the unusable plugins: nxdt plugins list says what is wrong.")
    return ways


def _offerer(dist: str, offer: str) -> str:
    """Distribution and version; a plugin file has neither and is called by its name."""
    if dist.strip() != _LOCAL:
        return dist
    plugin = offer.partition(":")[0]
    return "a file of plugins.local" if plugin == _LOCAL else f"the local file {plugin}.py"


def _unusable(sentences: tuple[str, ...]) -> str:
    return f" Installed but unusable: {'; '.join(sentences)}." if sentences else ""


class UnknownPlugin(NxdtError):
    """A plugin that is asked for by name and is not installed."""

    code = "NXDT-K020"
    happened = "No plugin or distribution is called '{name}'."
    remedy = "Installed are {installed}; 'nxdt plugins list' says more of them."
    name: str
    available: tuple[str, ...]

    def _view(self) -> dict[str, Any]:
        return {**super()._view(), "installed": listing(self.available)}


class UnknownErrorCode(NxdtError):
    """``nxdt explain`` was asked for a code that neither the core nor an installed plugin has."""

    code = "NXDT-K040"
    happened = "No error has the code '{wanted}'."
    remedy = "{near}Copy the code from the message; codes of a plugin are known where it is installed."
    wanted: str
    known: tuple[str, ...]

    def _view(self) -> dict[str, Any]:
        close = get_close_matches(self.wanted, self.known, n=3, cutoff=0.8)
        return {**super()._view(), "near": f"Did you mean {one_of(close)}? " if close else ""}


class BadPluginName(NxdtError):
    """A name for a plugin that a distribution and a Python package cannot both have."""

    code = "NXDT-K036"
    happened = "{name!r} cannot be the name of a plugin."
    remedy = "Use lower-case letters, digits and hyphens, begin with a letter, and do not begin with nxdt: my-model."
    name: str


class KindHasNoTemplates(NxdtError):
    """``nxdt plugins new`` cannot write a plugin for a kind that has no templates."""

    code = "NXDT-K037"
    happened = "There are no templates for a plugin of the kind {kind!r}."
    remedy = "The kinds with templates are {kinds}. docs/plugins.md describes the files of a plugin of any kind."
    kind: str
    available: tuple[str, ...]

    def _view(self) -> dict[str, Any]:
        return {**super()._view(), "kinds": listing(self.available, limit=20)}


class RepositoryPlaceTaken(NxdtError):
    """The directory of a new plugin is not empty."""

    code = "NXDT-K035"
    happened = "{path} exists, and is not an empty directory."
    remedy = "Take another name, or another place with --directory."
    path: str
