"""Errors of configurations and of ``nxdt config migrate``: codes ``NXDT-C…``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypedDict

from nxdt_core.errors.base import NxdtError, either, listing, one_of, unusable


class ConfigProblem(NxdtError):
    """Base of what can be wrong with one key; :class:`ConfigError` gathers them."""

    place: str
    """``run.yaml:12``, ``command line``, or where else the value comes from."""
    key: str
    """Dotted path; empty where the problem belongs to no key."""
    line: int = 0

    @property
    def shown_code(self) -> str:
        """Return the code of the report."""
        return self.code

    def row(self) -> str:
        """Return one line of the report."""
        do = self.do()
        key = f"{self.key}: " if self.key else ""
        return f"{self.place}: {key}{self.what()}{f' {do}' if do else ''} [{self.shown_code}]"


class Place(TypedDict):
    """Place of a problem: keywords of every :class:`ConfigProblem`."""

    place: str
    line: int
    key: str


class ConfigError(NxdtError):
    """A configuration with at least one problem; all of them are reported together."""

    code = "NXDT-C001"
    happened = "{source}: {count}."
    remedy = "{rows}"
    usual_remedy = "Correct each problem that is listed, by its own code."
    source: str
    problems: tuple[ConfigProblem, ...]

    def _view(self) -> dict[str, Any]:
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        rows = [problem.row() for problem in self.problems]
        return {**super()._view(), "count": count, "rows": "\n  ".join(rows)}


ConfigFileNotFound = ConfigProblem.define(
    "NXDT-C002",
    "The configuration, or a file that it names, is not there.",
    "no file '{path}'.",
    "{near}",
    usual_remedy="Check the path, or take the close name that the message suggests.",
    defaults={"candidates": ()},
    also=lambda error: {
        "near": f"Did you mean {one_of(error.candidates, 3)}?" if error.candidates else "Check the path."
    },
    example={"place": "my_rnu.yaml", "key": "", "path": "my_rnu.yaml", "candidates": ("my_run.yaml",)},
)

ConfigUnreadable = ConfigProblem.define(
    "NXDT-C003",
    "An existing file that cannot be read as text.",
    "cannot read '{path}': {reason}.",
    "Name a YAML file in UTF-8 that you may read.",
)


class YamlSyntax(ConfigProblem):
    """Text that is not valid YAML."""

    code = "NXDT-C004"
    happened = "not valid YAML: {reason}."
    remedy = "Correct that line or the one above it."
    example: ClassVar[Mapping[str, Any]] = {
        "place": "my_run.yaml:3",
        "key": "",
        "reason": "while parsing a flow sequence, did not find expected ',' or ']'",
    }
    reason: str


class YamlTooLarge(ConfigProblem):
    """A document that would take memory or time without end: nested too deep, or aliases of aliases."""

    code = "NXDT-C008"
    happened = "the document is too large for a configuration: {reason}."
    remedy = "Check where the file comes from. Write values out instead of nesting aliases."
    reason: str


DuplicateKey = ConfigProblem.define(
    "NXDT-C005",
    "A key that is given twice in one mapping; YAML libraries keep the last one silently.",
    "the key occurs twice; first at {first}.",
    "Remove one of them.",
    example={"place": "my_run.yaml:4", "key": "trainer.max_steps", "first": "my_run.yaml:3"},
)

BadOverride = ConfigProblem.define(
    "NXDT-C006",
    "An argument of the command line that sets no key.",
    "'{text}' sets no key: {reason}.",
    "Write key.path=value, such as trainer.max_steps=100.",
    example={"place": "command line", "key": "", "text": "trainer.max_steps:50", "reason": "it has no '='"},
)


class UnknownRecipe(ConfigProblem):
    """No usable plugin brings the recipe, or several do."""

    code = "NXDT-C007"
    happened = "{reason}."
    remedy = "{near}"
    usual_remedy = "Take the close name that the message suggests, or one of 'nxdt recipes list'."
    example: ClassVar[Mapping[str, Any]] = {
        "place": "recipe:lama-tiny",
        "key": "",
        "reason": "no plugin has a recipe of that name",
        "candidates": ("recipe:llama-tiny",),
    }
    reason: str
    candidates: tuple[str, ...] = ()
    advice: str = ""
    """Advice that makes the plugin with the recipe usable."""

    def _view(self) -> dict[str, Any]:
        near = f"Did you mean {one_of(self.candidates)}?" if self.candidates else "'nxdt recipes list' shows all."
        near = f"{self.advice[0].upper()}{self.advice[1:]}." if self.advice else near
        return {**super()._view(), "near": near}


class UnknownKey(ConfigProblem):
    """A key that neither the core nor the selected components know."""

    code = "NXDT-C010"
    happened = "unknown key."
    remedy = "{near}"
    usual_remedy = "Correct the spelling, or remove the key. The message suggests close keys or lists the known ones."
    example: ClassVar[Mapping[str, Any]] = {
        "place": "command line",
        "key": "model.num_layerz",
        "candidates": ("model.num_layers",),
    }
    candidates: tuple[str, ...] = ()
    known: tuple[str, ...] = ()
    unneeded: str = ""
    """Reason why no key here replaces a key of another program."""
    program: str = ""
    """Name of that program, where it is known."""

    def _view(self) -> dict[str, Any]:
        if self.unneeded:
            near = f"It is a key of {self.program}: {self.unneeded}. Leave it out."
        elif self.candidates and self.program:
            near = f"It is a key of {self.program}. Here it is {one_of(self.candidates)}."
        elif self.candidates:
            near = f"Did you mean {one_of(self.candidates)}?"
        else:
            near = f"Known here: {listing(self.known)}." if self.known else "The component takes no keys."
        return {**super()._view(), "near": near}


MissingKey = ConfigProblem.define(
    "NXDT-C011",
    "A key that must be given.",
    "required key is missing.",
    "Give it {allowed}.",
    example={"place": "my_run.yaml:3", "key": "data.seq_length", "allowed": "an integer of at least 1"},
)

WrongValue = ConfigProblem.define(
    "NXDT-C012",
    "A value of the wrong type, out of bounds, or not among those allowed.",
    "found {found}; allowed: {allowed}.",
    "{hint}",
    usual_remedy="Write a value of the type and range that the message names.",
    defaults={"hint": ""},
    example={
        "place": "command line",
        "key": "trainer.max_steps",
        "found": "'many' (text)",
        "allowed": "an integer of at least 1",
    },
)

BadInterpolation = ConfigProblem.define(
    "NXDT-C013",
    "A ``${…}`` that cannot be resolved.",
    "cannot resolve '{text}': {reason}.",
    "{near}",
    usual_remedy="Correct the name between the braces; it is a dotted key path or a resolver such as oc.env.",
    defaults={"advice": "", "candidates": ()},
    also=lambda error: {
        "near": f"Did you mean {either([f'${{{name}}}' for name in error.candidates])}?"
        if error.candidates
        else error.advice
    },
    example={
        "place": "command line",
        "key": "trainer.max_steps",
        "text": "${trainer.steps}",
        "reason": "there is no key 'trainer.steps'",
        "candidates": ("trainer.min_steps",),
    },
)

NotSupported = ConfigProblem.define(
    "NXDT-C015",
    "A key that the schema knows, with a value that is not carried out there.",
    "found {found}; {reason}.",
    "Allowed: {allowed}.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Misfit:
    """A value that another one does not divide by; the report has one problem for all that share ``of``."""

    of: str
    """Key of the divisor."""
    divisor: int
    place: Mapping[str, Any]
    """Keywords of the problem: where the divisor is written."""
    name: str
    """Name of the dividend in the message, usually its key."""
    number: int


class ImpossibleCombination(ConfigProblem):
    """Each value is valid, but the combination is not."""

    code = "NXDT-C016"
    happened = "{reason}."
    remedy = "{advice}"
    usual_remedy = "Change one of the values that the message names."
    example: ClassVar[Mapping[str, Any]] = {
        "place": "command line",
        "key": "data.global_batch_size",
        "reason": "15 does not divide by data.micro_batch_size 2 x 1 data parallel ranks",
        "advice": "Write a multiple of 2.",
    }
    reason: str
    advice: str
    cause: Misfit | None = None
    """The two values that do not divide, so that problems with the same divisor become one."""


class BadComponentChoice(ConfigProblem):
    """A component is not available. The message is that of the kernel."""

    code = "NXDT-C017"
    happened = "{inner}{note}"
    remedy = "{inner_remedy}"
    usual_remedy = "Choose an available name, or install the plugin that the message names."
    error: NxdtError
    note: str = ""
    """A sentence on where the choice comes from."""

    def _view(self) -> dict[str, Any]:
        return {**super()._view(), "inner": self.error.what(), "inner_remedy": self.error.do()}

    @property
    def shown_code(self) -> str:
        """Return the code of the kernel's error."""
        return self.error.code


class BadComponentConfig(ConfigProblem):
    """A component whose own section, or whose own check, is at fault."""

    code = "NXDT-C018"
    happened = "the configuration class of {component} is faulty: {reason}."
    remedy = "Report this to the author of {dist}."
    component: str
    dist: str
    reason: str


ComponentFinding = ConfigProblem.define(
    "NXDT-C019",
    "What a component or a plugin finds wrong with its settings.",
    "{message}",
    "{advice}",
    usual_remedy="Change the value as the component's message says.",
    defaults={"advice": ""},
    example={
        "place": "my_run.yaml:6",
        "key": "data.name",
        "message": "the dataset 'text' has no prompts, and the objective 'grpo' generates answers to them "
        "(plugin 'grpo').",
        "advice": "Set data.name to prompts.",
    },
)

SecretNotKept = ConfigProblem.define(
    "NXDT-C020",
    "A mask in place of a secret: the file was written by a run, which does not keep secrets.",
    "the secret was masked when this configuration was written.",
    "Give {key} again, best as ${{oc.env:NAME}} with the secret in that variable.",
)


def _credentials_in_address(error: Any) -> dict[str, Any]:
    if error.scheme == "s3":
        instead = (
            "Give them where boto3 looks: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment, a profile of "
            "~/.aws, or a role."
        )
    elif error.key.startswith("checkpoint."):
        instead = "Give them where the library of the storage backend looks."
    else:
        instead = "Put the whole address into a variable, and write ${oc.env:NAME}."
    return {"instead": instead}


CredentialsInAddress = ConfigProblem.define(
    "NXDT-C021",
    "A name, password or key within an address, which is printed and written.",
    "'{found}' holds credentials.",
    "Remove them from the address. {instead}",
    also=_credentials_in_address,
)


class CapabilityMissing(ConfigProblem):
    """A setting that the selected engine, model or optimizer does not declare."""

    code = "NXDT-C022"
    happened = (
        "found {found}, which needs the capability '{capability}' ({meaning}); the {role} '{name}' of {dist} does not "
        "declare it."
    )
    remedy = "{ways}"
    usual_remedy = "Choose a component that has the capability, or leave out what needs it."
    found: str
    instead: str
    capability: str
    meaning: str
    kind: str
    name: str
    dist: str
    selector: str
    """Key that selects the component."""
    others: tuple[str, ...] = ()
    """Components of the kind that declare it."""

    def _view(self) -> dict[str, Any]:
        other = f", or set {self.selector} to {one_of(self.others, 3)}" if self.others else ""
        ways = (
            f"{self.instead}{other}. For its authors: add '{self.capability}' to the capabilities of the record once "
            "the component does this."
        )
        role = self.kind.replace("_", " ")
        return {**super()._view(), "role": role, "ways": ways}


MigrationTargetExists = NxdtError.define(
    "NXDT-C031",
    "A file that writing would replace.",
    "{path} exists already.",
    "Name another file, or say --force to replace it.",
)

MigrationTargetUnwritable = NxdtError.define(
    "NXDT-C032",
    "A file that cannot be written where it was asked for.",
    "Cannot write {path}: {reason}.",
    "Name a file in a directory that exists and that you may write to.",
)


def _migration_unknown(error: Any) -> dict[str, Any]:
    known = f"Name the migration with --from: {', '.join(error.installed)}." if error.installed else ""
    more = f"Install a migration: {'; '.join(error.install)}." if error.install else ""
    return {
        "bad": unusable(error.unusable),
        "known": known or ("" if more else "No plugin offers any migration."),
        "more": f" {more}" if known and more else more,
    }


MigrationUnknown = NxdtError.define(
    "NXDT-C034",
    "A configuration that no installed migration recognises.",
    "No installed migration recognises '{source}'.{bad}",
    "{known}{more}",
    usual_remedy="Name the program with --from, or install the migration that the message names.",
    defaults={"installed": (), "install": (), "unusable": ()},
    also=_migration_unknown,
)

ValuesNotSet = NxdtError.define(
    "NXDT-C040",
    "A recipe whose placeholders, such as the paths of your data, are not replaced.",
    "{source}: {count} to set: {keys:, }.",
    "Add {examples} to the command, or set {them} in a file that starts with 'base: {source}'.",
    also=lambda error: {
        "count": "1 value" if len(error.keys) == 1 else f"{len(error.keys)} values",
        "examples": " ".join(f"{key}=..." for key in error.keys),
        "them": "it" if len(error.keys) == 1 else "them",
    },
    example={
        "source": "recipe:llama2-7b-sft",
        "keys": ("data.tokenizer.model", "data.train_files", "checkpoint.resume_from"),
    },
)
