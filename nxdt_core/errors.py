"""Every error that a user can cause: a code, what happened, what to do. Bugs are not in here.

The command line prints ``[code] what`` and ``do`` without a traceback and exits with status 2. An error
carries its data as attributes; its sentences are built here and nowhere else. Codes are stable:
``K`` kernel and plugins, ``C`` configuration, ``D`` data and tokenizers, ``M`` models and weights,
``P`` parallelism and launch, ``S`` checkpoints and storage, ``T`` training runs.
"""

from __future__ import annotations

from typing import Any, ClassVar, dataclass_transform

__all__ = [
    "AcceleratorMissing",
    "AmbiguousComponent",
    "BadBatchSize",
    "BadComponentChoice",
    "BadComponentConfig",
    "BadComponentRecord",
    "BadInterpolation",
    "BadJsonLine",
    "BadModelConfig",
    "BadOverride",
    "BadStorageKey",
    "BadStorageUri",
    "BadTokenizerConfig",
    "BadTokenizerFile",
    "CannotGenerate",
    "CannotWriteRunDirectory",
    "CheckpointConflict",
    "CheckpointDamaged",
    "CheckpointNotFound",
    "CheckpointTooNew",
    "ComponentFinding",
    "ComponentUnusable",
    "ConfigError",
    "ConfigFileNotFound",
    "ConfigProblem",
    "ConfigUnreadable",
    "ConflictingKeys",
    "DataChanged",
    "DataFileNotFound",
    "DataFileUnreadable",
    "DataNeedsTokenizer",
    "DuplicateKey",
    "EmptyDataset",
    "EmptyTextFile",
    "HFExchangeUnsupported",
    "HFFileDamaged",
    "HFFileMissing",
    "HFNotWritable",
    "HFUnsupported",
    "ImpossibleCombination",
    "JsonTextMissing",
    "KeyMapIncomplete",
    "LocalPluginMissing",
    "MissingKey",
    "MixedSamples",
    "NoCheckpointToResume",
    "NoInitRule",
    "NoTrainingData",
    "NotSupported",
    "NxdtError",
    "OptimizerStateDoesNotFit",
    "OptimizerStateNotTensor",
    "PluginHookFailed",
    "PluginLockMismatch",
    "PluginLockUnreadable",
    "PluginsUnusable",
    "RunAlreadyHasCheckpoints",
    "ScheduleHasNoEnd",
    "SequenceTooLongForModel",
    "ShareOfUnknownLength",
    "SpecialTokenMissing",
    "StorageDenied",
    "StorageError",
    "StorageFull",
    "StoragePathIsFile",
    "TensorNotInCheckpoint",
    "TensorStateUnsupported",
    "TextNotUtf8",
    "TokenizerFileNotFound",
    "TokenizerLibraryMissing",
    "TooFewTokens",
    "UnknownAccelerator",
    "UnknownComponent",
    "UnknownKey",
    "UnknownKind",
    "UnknownPlugin",
    "UnknownRecipe",
    "UnknownScheme",
    "UnsavableState",
    "VocabularyTooSmall",
    "WeightsDoNotFit",
    "WrongValue",
    "YamlSyntax",
]


@dataclass_transform(kw_only_default=True)
class NxdtError(Exception):
    """Base of all user-facing errors; annotated names of a subclass are its keyword-only data.

    (A hand-written initialiser instead of ``@dataclass``: that decorator compiles code for each class, 0.3 ms
    apiece, which every start of the command line would pay for sixty classes.)
    """

    code: ClassVar[str] = "NXDT-000"
    exit_status: ClassVar[int] = 2
    happened: ClassVar[str]
    """Template of what was found, over the names of ``_view``."""
    remedy: ClassVar[str]
    """Template of what to do."""

    def __init__(self, **data: Any) -> None:
        names = self._fields()
        missing = [n for n in names if n not in data and not hasattr(type(self), n)]
        unknown = [n for n in data if n not in names]
        if missing or unknown:
            raise TypeError(f"{type(self).__name__}: missing {missing}, unknown {unknown}")
        for name in names:
            setattr(self, name, data.get(name, getattr(type(self), name, None)))
        super().__init__()

    @classmethod
    def _fields(cls) -> list[str]:
        """Names of the data that instances carry, those of base classes first."""
        return [
            name
            for klass in reversed(cls.__mro__)
            for name, annotation in vars(klass).get("__annotations__", {}).items()
            if not str(annotation).startswith("ClassVar")
        ]

    def __reduce__(self) -> Any:
        return _rebuild, (type(self), NxdtError._view(self))

    def what(self) -> str:
        """One sentence: what was found."""
        return self.happened.format(**self._view())

    def do(self) -> str:
        """One sentence: what the user can do about it."""
        return self.remedy.format(**self._view())

    def _view(self) -> dict[str, Any]:
        """Values that the two templates may name; subclasses add what they compute."""
        return {name: getattr(self, name) for name in self._fields()}

    def __str__(self) -> str:
        return f"[{self.code}] {self.what()}\n  {self.do()}"


def _rebuild(cls: type[NxdtError], data: dict[str, Any]) -> NxdtError:
    return cls(**data)


def listing(names: tuple[str, ...] | list[str], limit: int = 8) -> str:
    """Join names for a sentence: ``'a', 'b' and 3 more``."""
    shown = ", ".join(repr(n) for n in names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


# --- K: kernel and plugins ------------------------------------------------------------------------------


class BadComponentRecord(NxdtError):
    """A record that a plugin yields is malformed."""

    code = "NXDT-K001"
    happened = "{record}.{field} cannot be {found!r}."
    remedy = "Write {field} as {wanted}."
    record: str
    field: str
    found: object

    def _view(self) -> dict[str, Any]:
        wanted = (
            "letters, digits and '_ . + -', starting with a letter or digit"
            if self.field == "name"
            else "'package.module:attribute'"
        )
        return {**super()._view(), "wanted": wanted}


class UnknownComponent(NxdtError):
    """A configuration names a component that no usable plugin offers."""

    code = "NXDT-K002"
    happened = "No {kind} is called {name!r} ({section}).{bad}"
    remedy = "{advice}"
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
        return {**super()._view(), "bad": _unusable(self.unusable), "advice": self._advice()}

    def _advice(self) -> str:
        ways = []
        if self.install:
            ways.append(f"Install it: pip install {self.install}.")
        if self.close:
            ways.append(f"Did you mean {' or '.join(map(repr, self.close))}?")
        if self.unusable:
            ways.append("Mend the unusable plugins: nxdt plugins list says what is wrong.")
        ways.append(f"Available: {listing(self.available)}." if self.available else "No plugin offers any.")
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
        written = " or ".join(map(repr, self.offers))
        return {**super()._view(), "by": " and ".join(self.dists), "written": written}


class UnknownKind(NxdtError):
    """Code or a command asks for a kind of component that does not exist."""

    code = "NXDT-K004"
    happened = "There is no kind of component called {kind!r}."
    remedy = "{hint}The kinds are {kinds}."
    kind: str
    close: tuple[str, ...]
    available: tuple[str, ...]

    def _view(self) -> dict[str, Any]:
        hint = f"Did you mean {' or '.join(map(repr, self.close))}? " if self.close else ""
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
        schemes = " or ".join(f"{name}://" for name in self.available) or "no scheme"
        return {**super()._view(), "bad": _unusable(self.unusable), "hint": hint, "schemes": schemes}


class ComponentUnusable(NxdtError):
    """A registered component's implementation or configuration class cannot be imported."""

    code = "NXDT-K006"
    happened = "The {kind} {name!r} of {dist} cannot be used: {reason}."
    remedy = "Repair or reinstall {dist}; its record gives {field}={reference!r}."
    kind: str
    name: str
    plugin: str
    dist: str
    field: str
    """``target`` or ``config``: which reference of the record failed."""
    reference: str
    reason: str


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
    remedy = "Install what the lock file names, or write it anew with nxdt plugins lock."
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


# --- C: configuration -----------------------------------------------------------------------------------


class ConfigProblem(NxdtError):
    """Base of what can be wrong with one key; :class:`ConfigError` gathers them."""

    place: str
    """``run.yaml:12``, ``command line``, or where else the value comes from."""
    key: str
    """Dotted path; empty where the problem belongs to no key."""
    line: int = 0

    def row(self) -> str:
        """One line of the report."""
        do = self.do()
        key = f"{self.key}: " if self.key else ""
        return f"{self.place}: {key}{self.what()}{f' {do}' if do else ''} [{self.code}]"


class ConfigError(NxdtError):
    """A configuration with at least one problem; all of them are told together."""

    code = "NXDT-C001"
    happened = "{source}: {count}."
    remedy = "{rows}"
    source: str
    problems: tuple[ConfigProblem, ...]

    def _view(self) -> dict[str, Any]:
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        return {**super()._view(), "count": count, "rows": "\n  ".join(problem.row() for problem in self.problems)}


class ConfigFileNotFound(ConfigProblem):
    """The configuration, or a file that it names, is not there."""

    code = "NXDT-C002"
    happened = "no file '{path}'."
    remedy = "{near}"
    path: str
    candidates: tuple[str, ...] = ()

    def _view(self) -> dict[str, Any]:
        near = f"Did you mean {listing(self.candidates, 3)}?" if self.candidates else "Check the path."
        return {**super()._view(), "near": near}


class ConfigUnreadable(ConfigProblem):
    """A file that is there and cannot be read as text."""

    code = "NXDT-C003"
    happened = "cannot read '{path}': {reason}."
    remedy = "Name a YAML file in UTF-8 that you may read."
    path: str
    reason: str


class YamlSyntax(ConfigProblem):
    """Text that is no YAML."""

    code = "NXDT-C004"
    happened = "not valid YAML: {reason}."
    remedy = "Correct that line or the one above it."
    reason: str


class DuplicateKey(ConfigProblem):
    """A key that stands twice in one mapping; YAML libraries keep the last one in silence."""

    code = "NXDT-C005"
    happened = "the key stands twice; first at {first}."
    remedy = "Remove one of them."
    first: str


class BadOverride(ConfigProblem):
    """An argument of the command line that sets no key."""

    code = "NXDT-C006"
    happened = "'{text}' sets no key: {reason}."
    remedy = "Write key.path=value, such as trainer.max_steps=100."
    text: str
    reason: str


class UnknownRecipe(ConfigProblem):
    """No usable plugin brings the recipe, or several do."""

    code = "NXDT-C007"
    happened = "{reason}."
    remedy = "{near}"
    reason: str
    candidates: tuple[str, ...] = ()

    def _view(self) -> dict[str, Any]:
        near = f"Did you mean {listing(self.candidates)}?" if self.candidates else "'nxdt recipes list' shows all."
        return {**super()._view(), "near": near}


class UnknownKey(ConfigProblem):
    """A key that neither the core nor the selected components know."""

    code = "NXDT-C010"
    happened = "unknown key."
    remedy = "{near}"
    candidates: tuple[str, ...] = ()
    known: tuple[str, ...] = ()

    def _view(self) -> dict[str, Any]:
        if self.candidates:
            near = f"Did you mean {' or '.join(repr(name) for name in self.candidates)}?"
        else:
            near = f"Known here: {listing(self.known)}." if self.known else "The component takes no keys."
        return {**super()._view(), "near": near}


class MissingKey(ConfigProblem):
    """A key that must be given."""

    code = "NXDT-C011"
    happened = "required key is missing."
    remedy = "Give it {allowed}."
    allowed: str


class WrongValue(ConfigProblem):
    """A value of the wrong type, out of bounds, or not among those allowed."""

    code = "NXDT-C012"
    happened = "found {found}; allowed: {allowed}."
    remedy = "{hint}"
    found: str
    allowed: str
    hint: str = ""


class BadInterpolation(ConfigProblem):
    """A ``${…}`` that cannot be resolved."""

    code = "NXDT-C013"
    happened = "cannot resolve '{text}': {reason}."
    remedy = "{near}"
    text: str
    reason: str
    advice: str = ""
    candidates: tuple[str, ...] = ()

    def _view(self) -> dict[str, Any]:
        meant = " or ".join(f"${{{name}}}" for name in self.candidates)
        return {**super()._view(), "near": f"Did you mean {meant}?" if meant else self.advice}


class ConflictingKeys(ConfigProblem):
    """Two spellings of one setting with two values."""

    code = "NXDT-C014"
    happened = "{found}, but '{other}' ({other_place}) says {other_found}; both are the same setting."
    remedy = "Keep one of the two."
    found: str
    other: str
    other_place: str
    other_found: str


class NotSupported(ConfigProblem):
    """A key that the schema knows and that this version, or the selected component, does not carry out."""

    code = "NXDT-C015"
    happened = "found {found}; {reason}."
    remedy = "Allowed: {allowed}."
    found: str
    reason: str
    allowed: str


class ImpossibleCombination(ConfigProblem):
    """Values that are each valid and together cannot work."""

    code = "NXDT-C016"
    happened = "{reason}."
    remedy = "{advice}"
    reason: str
    advice: str


class BadComponentChoice(ConfigProblem):
    """A component that cannot be had; carries the kernel's own error."""

    code = "NXDT-C017"
    happened = "{inner}{note}"
    remedy = "{inner_remedy}"
    error: NxdtError
    note: str = ""
    """A sentence on where the choice comes from."""

    def _view(self) -> dict[str, Any]:
        return {**super()._view(), "inner": self.error.what(), "inner_remedy": self.error.do()}

    def row(self) -> str:
        """One line of the report, with the code of the kernel's error."""
        return super().row().replace(f"[{self.code}]", f"[{self.error.code}]")


class BadComponentConfig(ConfigProblem):
    """A component whose own dataclass, or whose own check, is at fault."""

    code = "NXDT-C018"
    happened = "the configuration class of {component} is faulty: {reason}."
    remedy = "Report this to the author of {dist}."
    component: str
    dist: str
    reason: str


class ComponentFinding(ConfigProblem):
    """What a component or a plugin finds wrong with its settings."""

    code = "NXDT-C019"
    happened = "{message}"
    remedy = "{advice}"
    message: str
    advice: str = ""


# --- D: data and tokenizers -----------------------------------------------------------------------------


class DataFileNotFound(NxdtError):
    """A file or pattern of the data section that matches nothing."""

    code = "NXDT-D001"
    happened = "{key}: nothing is found at '{path}'{near}."
    remedy = "Correct the path; a relative path starts at the directory of the file that names it."
    key: str
    path: str
    candidates: tuple[str, ...] = ()

    def _view(self) -> dict[str, Any]:
        near = f"; nearby lies {listing(self.candidates)}" if self.candidates else ""
        return {**super()._view(), "near": near}


class EmptyTextFile(NxdtError):
    """A data file without any text."""

    code = "NXDT-D002"
    happened = "{path} holds no text."
    remedy = "Take the file out of the data section, or fill it."
    path: str


class DataFileUnreadable(NxdtError):
    """A data file that the operating system or a decompressor refuses."""

    code = "NXDT-D003"
    happened = "{path} cannot be read: {reason}."
    remedy = "Check that it is a complete file that you may read."
    path: str
    reason: str


class TextNotUtf8(NxdtError):
    """A data file with bytes that are no UTF-8."""

    code = "NXDT-D004"
    happened = "{path} is not UTF-8: byte {byte:#04x} at position {position} (line {line})."
    remedy = "Convert the file, for example with 'iconv -f LATIN1 -t UTF-8'."
    path: str
    position: int
    line: int
    byte: int


class BadJsonLine(NxdtError):
    """A line of a JSONL file that is no JSON object."""

    code = "NXDT-D005"
    happened = "{path}:{line}: not a JSON object: {reason}."
    remedy = 'Each line holds one whole object, such as {{"text": "..."}}; correct or remove this one.'
    path: str
    line: int
    reason: str


class JsonTextMissing(NxdtError):
    """A JSON object without a string under the key that holds the text."""

    code = "NXDT-D006"
    happened = "{path}:{line}: no text under the key '{key}'; {found}."
    remedy = "Set data.text_key to the key that holds the text, or correct the line."
    path: str
    line: int
    key: str
    found: str


class TooFewTokens(NxdtError):
    """A split that is shorter than one sample."""

    code = "NXDT-D007"
    happened = "The {split} data has {found} tokens; one sample of sequence length {seq_length} needs {needed}."
    remedy = "Add text, or lower the sequence length{hint}."
    split: str
    found: int
    needed: int
    seq_length: int
    hint: str = ""


class EmptyDataset(NxdtError):
    """A dataset that yields no sample."""

    code = "NXDT-D008"
    happened = "The dataset yields no sample."
    remedy = "Check which files and which split the data section names."


class BadBatchSize(NxdtError):
    """Batch sizes that do not divide."""

    code = "NXDT-D009"
    happened = (
        "A global batch of {global_batch_size} does not divide into micro-batches of {micro_batch_size} "
        "on {dp_size} data-parallel ranks."
    )
    remedy = "Make the global batch size a multiple of {unit} (micro-batch size x data-parallel ranks)."
    global_batch_size: int
    micro_batch_size: int
    dp_size: int

    def _view(self) -> dict[str, Any]:
        return {**super()._view(), "unit": self.micro_batch_size * self.dp_size}


class DataChanged(NxdtError):
    """A checkpoint whose data is not the data of this run, so that its position means nothing."""

    code = "NXDT-D010"
    happened = "The checkpoint was made with {aspect} {saved!r}; this run has {found!r}."
    remedy = "Restore the data, tokenizer and settings of that run to go on, or start a new run from its weights alone."
    aspect: str
    saved: object
    found: object


class MixedSamples(NxdtError):
    """Samples of one batch that do not fit together."""

    code = "NXDT-D011"
    happened = "Samples of one batch have different lengths: {lengths}."
    remedy = "Let the dataset cut or pad every sample to the run's sequence length."
    lengths: tuple[int, ...]


class DataNeedsTokenizer(NxdtError):
    """Text without a tokenizer."""

    code = "NXDT-D012"
    happened = "The '{dataloader}' data is text, and the configuration names no tokenizer."
    remedy = "Set data.tokenizer.library, for example to 'byte', which needs no files."
    dataloader: str


class SpecialTokenMissing(NxdtError):
    """A special token that is asked for and that the tokenizer does not have."""

    code = "NXDT-D013"
    happened = "{key} asks for a token that the tokenizer does not have ({token})."
    remedy = (
        "Set {key} to false, or name the token: in the tokenizer's files, or under data.tokenizer where it has a key."
    )
    key: str
    token: str


class TokenizerLibraryMissing(NxdtError):
    """A tokenizer whose library is not installed."""

    code = "NXDT-D020"
    happened = "The tokenizer '{tokenizer}' needs the package '{package}', which cannot be imported: {reason}."
    remedy = "Run: pip install nxdt-core[{extra}]"
    tokenizer: str
    package: str
    extra: str
    reason: str


class TokenizerFileNotFound(NxdtError):
    """A tokenizer's file or directory that is not there."""

    code = "NXDT-D021"
    happened = "{key}: '{path}' is no {wanted}{near}."
    remedy = "Correct the path, or download the tokenizer's files there first."
    key: str
    path: str
    wanted: str
    candidates: tuple[str, ...] = ()

    def _view(self) -> dict[str, Any]:
        near = f"; nearby lies {listing(self.candidates)}" if self.candidates else ""
        return {**super()._view(), "near": near}


class BadTokenizerFile(NxdtError):
    """A tokenizer's file that its library does not accept."""

    code = "NXDT-D022"
    happened = "{path} is no {wanted}: {reason}."
    remedy = "Replace the file with a whole one; a Git LFS pointer or an aborted download looks like this."
    path: str
    wanted: str
    reason: str


class BadTokenizerConfig(NxdtError):
    """Settings of a tokenizer that exclude each other or do not fit its files."""

    code = "NXDT-D023"
    happened = "{key}: {reason}."
    remedy = "Correct the section data.tokenizer."
    key: str
    reason: str


# --- M: models and weights ------------------------------------------------------------------------------


class NoInitRule(NxdtError):
    """No rule of the model says how a parameter starts."""

    code = "NXDT-M001"
    happened = "No initialisation rule matches the parameter '{parameter}'; there are rules for {listed}."
    remedy = "Add a rule to the builder's or the adapter's init_rules(); the pattern '*' matches whatever is left."
    parameter: str
    patterns: list[str]

    def _view(self) -> dict[str, Any]:
        return {**super()._view(), "listed": listing(self.patterns) or "nothing"}


class BadModelConfig(NxdtError):
    """Values of a model's section cannot work together."""

    code = "NXDT-M002"
    happened = "The model '{model}' cannot be built: {listed}."
    remedy = "Correct these keys of the section model."
    model: str
    problems: list[str]

    def _view(self) -> dict[str, Any]:
        return {**super()._view(), "listed": "; ".join(self.problems)}


class HFFileMissing(NxdtError):
    """A Hugging Face directory lacks a file."""

    code = "NXDT-M010"
    happened = "'{directory}' holds no {wanted}."
    remedy = "Name a directory with config.json and safetensors weights; pickled weights (.bin, .pt) are never read."
    directory: str
    wanted: str


class HFFileDamaged(NxdtError):
    """A file of a Hugging Face directory cannot be read."""

    code = "NXDT-M011"
    happened = "'{path}' cannot be read: {reason}."
    remedy = "Download or export the file again."
    path: str
    reason: str


class HFUnsupported(NxdtError):
    """A Hugging Face model has a feature that the builder does not implement."""

    code = "NXDT-M012"
    happened = "The Hugging Face configuration has {key} = {found!r}, which the model '{model}' does not implement."
    remedy = "Supported is {supported}; take another model or a plugin that implements this one."
    model: str
    key: str
    found: object
    supported: str


class HFNotWritable(NxdtError):
    """An export would overwrite files."""

    code = "NXDT-M013"
    happened = "'{directory}' is not an empty directory."
    remedy = "Export into a new directory."
    directory: str


class HFExchangeUnsupported(NxdtError):
    """A builder has no correspondence to Hugging Face's parameters."""

    code = "NXDT-M014"
    happened = "The model builder '{builder}' does not read or write Hugging Face directories."
    remedy = "Let it implement nxdt_core.protocols.model.HFExchange."
    builder: str


class KeyMapIncomplete(NxdtError):
    """A builder's key map does not cover a parameter, or covers it wrongly."""

    code = "NXDT-M015"
    happened = "The key map of '{builder}' does not fit the parameter '{parameter}': {reason}."
    remedy = "Correct the builder's hf_key_map(): one entry a parameter, '*' for each number in its name."
    builder: str
    parameter: str
    reason: str


class WeightsDoNotFit(NxdtError):
    """Weights of another model, or a checkpoint that lacks some."""

    code = "NXDT-M050"
    happened = "The weights do not fit the model: {summary}."
    remedy = "Use the configuration that the weights were trained with, or load them with strict=False."
    missing: list[str]
    extra: list[str]
    shapes: list[str]

    def _view(self) -> dict[str, Any]:
        parts = [
            f"{len(names)} {word} ({listing(names, 4)})"
            for names, word in ((self.missing, "missing"), (self.extra, "unknown"), (self.shapes, "of another shape"))
            if names
        ]
        return {**super()._view(), "summary": "; ".join(parts)}


class VocabularyTooSmall(NxdtError):
    """The tokenizer has more ids than the model has rows."""

    code = "NXDT-M051"
    happened = "The tokenizer has {tokenizer} ids, the model's vocabulary has {model} rows."
    remedy = "Set model.vocab_size to {tokenizer} or more (a multiple of 128 is quicker on accelerators)."
    tokenizer: int
    model: int


class SequenceTooLongForModel(NxdtError):
    """Positions end before the sequence does."""

    code = "NXDT-M052"
    happened = "Sequences have {sequence} tokens, the model has positions for {longest}."
    remedy = "Shorten data.seq_length or raise model.max_position_embeddings."
    sequence: int
    longest: int


# --- P: parallelism and launch --------------------------------------------------------------------------


class UnknownAccelerator(NxdtError):
    """A device type that no profile describes."""

    code = "NXDT-P001"
    happened = "trainer.accelerator names no device type: {accelerator!r}."
    remedy = "Write one of {names}, or auto."
    accelerator: str
    known: tuple[str, ...]

    def _view(self) -> dict[str, Any]:
        return {**super()._view(), "names": listing(self.known)}


class AcceleratorMissing(NxdtError):
    """A device type that this machine, or this build of torch, does not have."""

    code = "NXDT-P002"
    happened = "trainer.accelerator is {accelerator!r}, and torch finds only {found!r} here."
    remedy = "Install the build of torch for that device and its driver, or set trainer.accelerator=auto."
    accelerator: str
    found: str


# --- S: checkpoints and storage -------------------------------------------------------------------------


class StorageError(NxdtError):
    """Base of what a store of checkpoints can fail with; a store raises it, or a subclass, for what a user can mend."""

    code = "NXDT-S000"
    happened = "The checkpoint store failed at {where}: {reason}."
    remedy = "Check that the store can be reached and written, then run the same command again."
    where: str
    reason: str


class StorageFull(StorageError):
    """No space is left, or a quota is used up."""

    code = "NXDT-S001"
    happened = "No space is left for {where}: {reason}."
    remedy = (
        "Checkpoints committed before are intact. Free space, keep fewer checkpoints (checkpoint.keep_last) or name "
        "another place (checkpoint.uri); the same command then goes on from the newest checkpoint."
    )


class StorageDenied(StorageError):
    """The store may not be read or written."""

    code = "NXDT-S002"
    happened = "Access to {where} is denied: {reason}."
    remedy = "Give this user the right to read and write there, or set checkpoint.uri to a place that is writable."


class StoragePathIsFile(StorageError):
    """A part of the path that must be a directory is something else."""

    code = "NXDT-S003"
    happened = "{where} cannot hold checkpoints: {reason}."
    remedy = "Set checkpoint.uri to a directory, which need not exist, or move what lies in the way."


class BadStorageKey(StorageError):
    """A key that no store accepts."""

    code = "NXDT-S004"
    happened = "{where!r} is no key of a store: {reason}."
    remedy = "Write keys as relative paths such as 'step-00000100/manifest.json'."


class BadStorageUri(StorageError):
    """An address of a store that means nothing."""

    code = "NXDT-S005"
    happened = "{where!r} is no address for checkpoints: {reason}."
    remedy = "Write a path ('runs/a/checkpoints'), 'file:///absolute/path' or 'scheme://…' of an installed store."


class CheckpointDamaged(StorageError):
    """A file of a committed checkpoint is not what was written."""

    code = "NXDT-S010"
    happened = "The checkpoint file {where} is damaged: {reason}."
    remedy = (
        "Resume from another step ('nxdt checkpoint list' shows them), or restore the file from a copy; "
        "'nxdt checkpoint verify' lists all that is damaged."
    )


class CheckpointNotFound(StorageError):
    """No committed checkpoint where one was asked for."""

    code = "NXDT-S011"
    happened = "There is no checkpoint at {where}: {reason}."
    remedy = "'nxdt checkpoint list' shows what an address holds; name its root or one of its step directories."


class CheckpointTooNew(StorageError):
    """A checkpoint of a format that this version does not read."""

    code = "NXDT-S012"
    happened = "{where} cannot be read by this version of nxdt-core: {reason}."
    remedy = "pip install --upgrade nxdt-core."


class UnsavableState(StorageError):
    """A value that a checkpoint cannot hold: neither JSON nor a plain tensor."""

    code = "NXDT-S013"
    happened = "The state under {where!r} cannot be saved: {reason}."
    remedy = (
        "Keep None, bool, int, float, str, lists, tuples, dicts and plain tensors in states: a checkpoint holds JSON "
        "and raw tensors only, so that loading one can run no code."
    )


class CheckpointConflict(StorageError):
    """Two writers saved the same step at once."""

    code = "NXDT-S014"
    happened = "{where} was committed by another process meanwhile: {reason}."
    remedy = "See that no second job writes to this checkpoint.uri, then run the same command again."


class TensorNotInCheckpoint(StorageError):
    """A tensor that was asked for is not in the checkpoint."""

    code = "NXDT-S015"
    happened = "The checkpoint {where} lacks what was asked for: {reason}."
    remedy = "Load it into the model and optimizer that it was saved from, or ask for the names that it has."


class TensorStateUnsupported(UnsavableState):
    """A tensor that is not dense, plain and of a known dtype."""

    code = "NXDT-S016"
    remedy = "Save dense tensors of a floating-point, integer or boolean dtype that hold data."


# --- T: training runs -----------------------------------------------------------------------------------


class ScheduleHasNoEnd(NxdtError):
    """A decaying learning-rate curve without a last step."""

    code = "NXDT-T001"
    happened = "model.optim.sched: {schedule} decays to an end, and neither it nor the trainer has one."
    remedy = "Set model.optim.sched.max_steps or trainer.max_steps to a positive number."
    schedule: str


class OptimizerStateDoesNotFit(NxdtError):
    """Saved optimizer state of parameters that the model does not train."""

    code = "NXDT-T002"
    happened = "The checkpoint has optimizer state of {count} parameters that this run does not train ({names})."
    remedy = (
        "Resume with the model and adapter of the checkpoint, or load its weights only: model.weight_init_only=true."
    )
    parameters: list[str]

    def _view(self) -> dict[str, Any]:
        return {**super()._view(), "count": len(self.parameters), "names": listing(self.parameters, 4)}


class OptimizerStateNotTensor(NxdtError):
    """An optimizer keeps state that no checkpoint can hold."""

    code = "NXDT-T003"
    happened = "The optimizer keeps {state!r} of {parameter!r} as a {found}, which a checkpoint cannot hold."
    remedy = "Keep state per parameter as tensors, ints, floats or bools."
    parameter: str
    state: str
    found: str


class NoTrainingData(NxdtError):
    """A dataloader without a training split."""

    code = "NXDT-T004"
    happened = "The dataloader {loader} has no training data."
    remedy = "Name the training files in the section data; `nxdt config show` prints what it holds now."
    loader: str


class RunAlreadyHasCheckpoints(NxdtError):
    """A new run would write into an older one's checkpoints."""

    code = "NXDT-T005"
    happened = "{uri} already holds checkpoints, up to step {step}."
    remedy = "Go on with exp_manager.resume_if_exists=true, or give the new run another name=…."
    uri: str
    step: int


class NoCheckpointToResume(NxdtError):
    """Told to resume, and there is nothing to resume from."""

    code = "NXDT-T006"
    happened = "There is no good checkpoint at {uri} to resume from."
    remedy = "Check the path with `nxdt checkpoint list`; exp_manager.resume_ignore_no_checkpoint=true starts afresh."
    uri: str


class CannotWriteRunDirectory(NxdtError):
    """The run's directory cannot be made or written."""

    code = "NXDT-T007"
    happened = "The run's directory {path} cannot be written: {reason}."
    remedy = "Choose another with exp_manager.exp_dir=…."
    path: str
    reason: str


class CannotGenerate(NxdtError):
    """A checkpoint that text cannot be drawn from."""

    code = "NXDT-T008"
    happened = "This checkpoint cannot generate: {reason}."
    remedy = "Give a prompt, and a checkpoint of a run whose section data.tokenizer names a tokenizer."
    reason: str


class ShareOfUnknownLength(NxdtError):
    """A share of a dataset that is a stream."""

    code = "NXDT-T009"
    happened = "{key} is the share {share}, and the dataset does not know how many samples it has."
    remedy = "Give a number of batches, or null for all."
    key: str
    share: float
