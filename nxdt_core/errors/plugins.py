"""Errors of the kernel and of plugins: codes ``NXDT-K…``."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, ClassVar

from nxdt_core.errors.base import NxdtError, either, listing, one_of, unusable

_LOCAL = "local"
"""Distribution name of a plugin that is a file."""


_FORMS = {
    "name": "letters, digits and '_ . + -', starting with a letter or digit",
    **dict.fromkeys(("capabilities", "requires", "requires_of_model"), "a frozenset of names"),
}
BadComponentRecord = NxdtError.define(
    "NXDT-K001",
    "A record that a plugin yields is malformed.",
    "{record}.{field} cannot be {found!r}.",
    "Write {field} as {wanted}.",
    also=lambda error: {"wanted": _FORMS.get(error.field, "'package.module:attribute'")},
)


class UnknownComponent(NxdtError):
    """A configuration names a component that no usable plugin offers."""

    code = "NXDT-K002"
    happened = "No {kind} is called {name!r} ({section}).{bad}"
    remedy = "{advice}"
    usual_remedy = "Choose an available name, or install the distribution that the message names."
    example: ClassVar[Mapping[str, Any]] = {
        "kind": "adapter",
        "name": "lora",
        "section": "adapter.name",
        "install": "nxdt-plugin-lora",
    }
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
        ways = []
        if self.install:
            ways.append(f"Install it: pip install {self.install}.")
        if self.close:
            ways.append(f"Did you mean {one_of(self.close)}?")
        # The configuration blocks some plugins, others are faulty.
        if any(sentence.endswith("is blocked: named in plugins.block") for sentence in self.unusable):
            ways.append("Take it out of plugins.block.")
        if any(sentence.endswith("is blocked: not named in plugins.allow") for sentence in self.unusable):
            ways.append("Name it in plugins.allow.")
        if any(" is blocked: " not in sentence for sentence in self.unusable):
            ways.append("Fix the unusable plugins: nxdt plugins list says what is wrong.")
        if self.available:
            ways.append(f"Available: {listing(self.available)}.")
        elif not self.unusable:
            ways.append("No plugin offers any.")
        kind = self.kind.replace("_", " ")
        return {**super()._view(), "kind": kind, "bad": unusable(self.unusable), "advice": " ".join(ways)}


AmbiguousComponent = NxdtError.define(
    "NXDT-K003",
    "Several plugins offer one short name.",
    "The {kind} {name!r} is offered by several plugins: {by}.",
    "Write {written}, or name the plugin that is meant in plugins.prefer.",
    also=lambda error: {"by": " and ".join(map(_offerer, error.dists, error.offers)), "written": one_of(error.offers)},
)

UnknownKind = NxdtError.define(
    "NXDT-K004",
    "Code or a command asks for a kind of component that does not exist.",
    "There is no kind of component called {kind!r}.",
    "{hint}The kinds are {available:list20}.",
    also=lambda error: {"hint": f"Did you mean {one_of(error.close)}? " if error.close else ""},
)

_LOCAL_STORE = (
    " For a store in a plugin file, list the file in plugins.local of the configuration; commands on checkpoints take"
    " the configuration as --config FILE."
)
UnknownScheme = NxdtError.define(
    "NXDT-K005",
    "No usable plugin stores checkpoints at addresses of a scheme.",
    "No plugin stores checkpoints at {scheme}:// addresses.{bad}",
    "{hint}Use a plain path, or an address that begins with {schemes}.{local}",
    defaults={"unusable": (), "install": None},
    also=lambda error: {
        "bad": unusable(error.unusable),
        "hint": f"Install the plugin: pip install {error.install}. " if error.install else "",
        "schemes": either([f"{name}://" for name in error.available]) if error.available else "no scheme",
        "local": "" if error.install or error.unusable else _LOCAL_STORE,
    },
)


class ComponentUnusable(NxdtError):
    """A registered component's implementation or configuration class cannot be imported."""

    code = "NXDT-K006"
    happened = "The {kind} {name!r} of {dist} cannot be used: {reason}."
    remedy = "{advice}; its record gives {field}={reference!r}."
    usual_remedy = "Install what its import lacks, or report it to the plugin's author."
    kind: str
    name: str
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


PluginsUnusable = NxdtError.define(
    "NXDT-K008",
    "Strict mode: an installed plugin cannot be used.",
    "Installed plugins cannot be used: {problems:; }.",
    "Repair, upgrade or remove them, or name them in plugins.block.",
)

PluginLockMismatch = NxdtError.define(
    "NXDT-K009",
    "The installed plugins are not those of the lock file.",
    "The plugins are not those of {path}: {differences:; }.",
    "Install what the lock file names, or write it again with nxdt plugins lock.",
)

PluginLockUnreadable = NxdtError.define(
    "NXDT-K010",
    "A lock file is missing or malformed.",
    "The lock file {path} cannot be read: {reason}.",
    "Correct plugins.lock, or write the file with nxdt plugins lock.",
)


class LocalPluginMissing(NxdtError):
    """The configuration names a plugin file that does not exist."""

    code = "NXDT-K011"
    happened = "There is no plugin file {path}."
    remedy = "Correct plugins.local; relative paths are taken from the directory of the configuration file."
    path: str


PluginCodeExited = NxdtError.define(
    "NXDT-K012",
    "Code of a plugin calls ``sys.exit`` or ``exit``, or a library that it uses panics.",
    "Code of {who} {reason}.",
    "Report it to the plugin's authors: such code raises an exception where it cannot continue.",
    also=lambda error: {"who": f"the plugin {error.origin}" if error.origin else "a plugin or a library"},
)

KitsMissing = NxdtError.define(
    "NXDT-K030",
    "The conformance kits are asked for where they are not installed.",
    "The kits that check {name!r} are not installed.",
    "Install it: pip install nxdt-testing.",
)

PipMissing = NxdtError.define(
    "NXDT-K031",
    "The index is asked for where pip is not installed.",
    "{python} has no pip, which knows the package index.",
    "Install it: python -m ensurepip; or compare the versions of nxdt plugins list with your index.",
)

SchemeNotAllowed = NxdtError.define(
    "NXDT-K033",
    "An address of checkpoints has a scheme that the configuration does not allow.",
    "plugins.schemes does not allow addresses with '{scheme}://'; a plain path has the scheme 'file'.",
    "Allowed are {allowed:list}: correct the address, or add '{scheme}' to plugins.schemes.",
)

PluginLockUnwritable = NxdtError.define(
    "NXDT-K034",
    "The lock file cannot be written.",
    "The lock file {path} cannot be written: {reason}.",
    "Name a file in a directory that you can write to.",
)


def _offerer(dist: str, offer: str) -> str:
    """Distribution and version; a plugin file has neither and is called by its name."""
    if dist.strip() != _LOCAL:
        return dist
    plugin = offer.partition(":")[0]
    return "a file of plugins.local" if plugin == _LOCAL else f"the local file {plugin}.py"


UnknownPlugin = NxdtError.define(
    "NXDT-K020",
    "A plugin that is asked for by name and is not installed.",
    "No plugin or distribution is called '{name}'.",
    "Installed are {available:list}; 'nxdt plugins list' says more of them.",
)

UnknownErrorCode = NxdtError.define(
    "NXDT-K040",
    "``nxdt explain`` was asked for a code that neither the core nor an installed plugin has.",
    "No error has the code '{wanted}'.",
    "{near}Copy the code from the message; codes of a plugin are known where it is installed.",
    also=lambda error: {
        "near": f"Did you mean {one_of(close)}? "
        if (close := get_close_matches(error.wanted, error.known, n=3, cutoff=0.8))
        else ""
    },
)

BadPluginName = NxdtError.define(
    "NXDT-K036",
    "A name for a plugin that a distribution and a Python package cannot both have.",
    "{name!r} cannot be the name of a plugin.",
    "Use lower-case letters, digits and hyphens, begin with a letter, and do not begin with nxdt: my-model.",
)

KindHasNoTemplates = NxdtError.define(
    "NXDT-K037",
    "``nxdt plugins new`` cannot write a plugin for a kind that has no templates.",
    "There are no templates for a plugin of the kind {kind!r}.",
    "The kinds with templates are {available:list20}. docs/plugins.md describes the files of a plugin of any kind.",
)

RepositoryPlaceTaken = NxdtError.define(
    "NXDT-K035",
    "The directory of a new plugin is not empty.",
    "{path} exists, and is not an empty directory.",
    "Take another name, or another place with --directory.",
)
