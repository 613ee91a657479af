"""Adapters as peft stores them: names and forms of their tensors, ``adapter_config.json``, and both files.

An update is stored with the matrix that it belongs to. What the key map of the model's builder does to the rows of that
is done to those of ``lora_B`` and of DoRA's norms, and ``lora_A`` is as it is here.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from nxdt_core.checkpoint.format.hf_source import read_json
from nxdt_core.config.huggingface import unusable
from nxdt_core.distributed.devices import HOST
from nxdt_core.errors.models import WeightsDoNotFit
from nxdt_core.hf.key_map import Source, sources
from nxdt_core.protocols.model import ModelBuilder
from nxdt_core.system.regular_files import replace_text, replacing, require_fetched, require_inside
from nxdt_plugin_lora.adaptation import adaptable_names, tables_of
from nxdt_plugin_lora.config import LoraConfig, ends_in
from nxdt_plugin_lora.errors import AdapterDiffers, AdapterFileDamaged, NoPeftForm

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_BASE = "nxdt_base"
"""Key of the file's metadata, which peft leaves alone: digest of the base that the adapter was trained over."""
_PREFIX = "base_model.model."
_PAIR = ("gate_proj", "up_proj")
_HEAD = "lm_head.weight"
"""Name of a head that shares the embedding's weight and therefore has no separate tensor."""
_RENAMED = ".block_sparse_moe."
"""Part of names in Mixtral's files. It is ``.mlp.`` in memory, where peft looks for modules that train whole."""
_ROWS = {"transpose": "none", "interleave_transpose": "interleave"}
"""Transform → its effect on rows alone, where the two differ."""
_STARTS_AT = {"lora_A0": "lora_A", "lora_B0": "lora_B"}
"""Frozen initial values → what they are those of; in peft both are one tensor, of twice the rank."""
_IN_PEFT = {"lora_A": "lora_A.weight", "lora_B": "lora_B.weight", "lora_magnitude": "lora_magnitude_vector"}
_EMBEDDING_IN_PEFT = {**_IN_PEFT, "lora_A": "lora_embedding_A", "lora_B": "lora_embedding_B"}


_SAME = {"r": "lora_rank", "lora_alpha": "lora_alpha", "use_rslora": "use_rslora", "use_dora": "use_dora"}
"""Theirs → ours: what decides on the values of the update."""
_THEIR_DEFAULTS = {"r": 8, "lora_alpha": 8, "use_rslora": False, "use_dora": False}
_PATTERNS = {"rank_pattern": "lora_rank", "alpha_pattern": "lora_alpha"}
"""Keys, theirs and ours, for some layers → ours for all others."""
_UNREAD = (
    "lora_bias",
    "layer_replication",
    "target_parameters",
    "trainable_token_indices",
    "megatron_config",
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
    "use_bdlora",
    "use_qalora",
    "velora_config",
)
"""Features of peft that change what is computed or trained and are not implemented."""
_STARTS = (True, False, None, "gaussian", "eva", "orthogonal", "pissa")
"""Values of ``init_lora_weights`` that leave the base as it is; most others take the start out of it. So does
``pissa``, which has a start here."""
MERGE = "Merge it into the model with peft (merge_and_unload), and start from that model."
"""Advice if no section here describes what a file has."""
_CONVERT = (
    "Convert it with peft (save_pretrained(..., path_initial_model_for_weight_conversion=DIR), where DIR is the "
    "adapter as it was before training), or merge it there (merge_and_unload) and start from that model."
)
_SPELL_OUT = (
    "Write {key} of adapter_config.json out as names of modules or ends of their paths, such as "
    "model.layers.0.mlp.up_proj or down_proj."
)
_LAYERS = (".gate_proj.weight", ".up_proj.weight", ".down_proj.weight")
"""Ends of the names of layer weights, for adapters of ours that are target parameters in peft."""
_CONVERTED = ("pissa", "corda", "olora", "lora_ga")
"""Beginnings of values of ``init_lora_weights`` that peft converts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateParameter:
    """A parameter of an update."""

    base: str
    """Global name of the matrix that is updated."""
    kind: str
    """``lora_A``, ``lora_B`` or ``lora_magnitude``; ``lora_A0``, ``lora_B0``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeftTensor:
    """One trained parameter, and the tensors that stand for it there."""

    source: Source
    modules: tuple[str, ...]
    """Modules of transformers that the parameter updates or belongs to."""
    leaf: UpdateParameter | None
    """Name of the parameter within the update; None for a parameter of the base that trains whole."""
    transposed: bool = False
    """True if the tensors are stored transposed."""
    tied_name: str | None = None
    """Name of the same tensor again, where two modules share it."""
    start: str | None = None
    """Name of the parameter with the frozen initial values, which the tensors have, too."""

    def write(self, tensor: torch.Tensor, start: torch.Tensor | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of the file, from the parameter and its initial values."""
        if start is not None:  # of twice the rank: B A - B0 A0
            assert self.leaf is not None
            is_a = self.leaf.kind == "lora_A"
            tensor = torch.cat([tensor, start if is_a else -start], -2 if is_a else -1)
        for part in self.source.tensors():
            values = part.transform.write(tensor[part.region.within(part.region.whole(part.parameter_shape))])
            yield part.name, (values.t() if self.transposed else values).contiguous()
            if self.tied_name is not None:
                yield self.tied_name, values.clone()

    def read(self, fetch: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """Return the parameter, of tensors that ``fetch`` gives by name."""
        return self.source.read(lambda name: fetch(name).t() if self.transposed else fetch(name))


def base_of(name: str) -> UpdateParameter | None:
    """Return what the parameter ``name`` of an update belongs to; None for one of the base."""
    owner, _, kind = name.rpartition(".")
    if kind not in _IN_PEFT and kind not in _STARTS_AT:
        return None
    layer, _, last = owner.rpartition(".")
    if last == "update":
        return UpdateParameter(base=f"{layer}.weight", kind=kind)
    return UpdateParameter(base=f"{layer.removesuffix('.updates')}.{last}", kind=kind)


def peft_tensors(
    builder: ModelBuilder, shapes: Mapping[str, tuple[int, ...]], embeddings: Iterable[str]
) -> dict[str, PeftTensor]:
    """Return the trained parameters of a model, whose shapes these are, by name.

    ``builder`` knows no adapters; ``embeddings`` are the names of the tables that are looked up.

    Raises:
        HFExchangeUnsupported: the builder has no key map.
        NoPeftForm: an update of a matrix that is several in transformers, or weights that peft cannot train whole.
    """
    tied = dict(builder.plan().tied)
    of_base = {source.name: source for source in sources(builder)}
    of_base |= {user: of_base[owner] for owner, user in tied.items()}
    leaves = {name: base_of(name) for name in shapes}
    updated = {leaf.base.rpartition(".")[0] for leaf in leaves.values() if leaf is not None}
    tables, tensors = frozenset(embeddings), dict[str, PeftTensor]()
    for name, shape in shapes.items():
        leaf = leaves[name]
        if leaf is None:
            tensors[name] = _whole(of_base[name], updated, tied)
        elif leaf.kind not in _STARTS_AT:
            source = of_base[leaf.base]
            if leaf.base == tied.get(source.name):  # a tied head, which has no tensor
                source = replace(source, hf_names=(_HEAD,))
            start = f"{name}0" if f"{name}0" in shapes else None
            if start is not None:
                shape = (2 * shape[0], shape[1]) if leaf.kind == "lora_A" else (shape[0], 2 * shape[1])
            tensor = _update(name, shape, leaf, source, table=leaf.base in tables)
            tensors[name] = replace(tensor, start=start)
    return tensors


def _whole(source: Source, updated: set[str], tied: Mapping[str, str]) -> PeftTensor:
    """Return a parameter of the base; the bias of a layer with an update is below its ``base_layer``."""
    if len(source.shape) == 3:
        raise NoPeftForm(parameter=source.name, reason="peft trains no experts whole")
    if source.hf_names == (source.name.removesuffix(".weight"),):
        raise NoPeftForm(parameter=source.name, reason="peft trains modules whole, and there it is part of one")
    if any(_RENAMED in name for name in source.hf_names):
        raise NoPeftForm(parameter=source.name, reason="transformers opens its module under another name")
    owner = source.name.rpartition(".")[0]
    if source.name in tied:  # an embedding that is the head too: peft keeps a copy for each
        if {owner, tied[source.name].rpartition(".")[0]} & updated:
            raise NoPeftForm(parameter=source.name, reason="embedding and head share it, and one of them has an update")
        return PeftTensor(
            source=replace(source, hf_names=tuple(f"{_PREFIX}{name}" for name in source.hf_names)),
            modules=tuple(name.rpartition(".")[0] for name in (*source.hf_names, _HEAD)),
            leaf=None,
            tied_name=f"{_PREFIX}{_HEAD}",
        )
    modules = tuple(name.rpartition(".")[0] for name in source.hf_names)
    beneath = ".base_layer" if owner in updated else ""
    names = tuple(
        f"{_PREFIX}{module}{beneath}.{name.rpartition('.')[2]}"
        for module, name in zip(modules, source.hf_names, strict=True)
    )
    return PeftTensor(source=replace(source, hf_names=names), modules=modules, leaf=None)


def _update(name: str, shape: tuple[int, ...], leaf: UpdateParameter, source: Source, *, table: bool) -> PeftTensor:
    if source.transform == "concat":
        reason = f"transformers keeps that matrix as {len(source.hf_names)} tensors"
        raise NoPeftForm(parameter=leaf.base, reason=reason)
    if len(source.shape) == 3 and source.transform != "stack":
        raise NoPeftForm(parameter=leaf.base, reason="transformers keeps all experts in one tensor")
    if table and leaf.kind == "lora_magnitude" and source.transform == "pad" and source.sections != source.shape[:1]:
        raise NoPeftForm(
            parameter=leaf.base, reason="its norms count the rows that fill the vocabulary up, which only we have"
        )
    modules = tuple(theirs.removesuffix(".weight") for theirs in source.hf_names)
    suffix = (_EMBEDDING_IN_PEFT if table else _IN_PEFT)[leaf.kind]
    by_rows = leaf.kind == "lora_A" if table else leaf.kind != "lora_A"
    transform = _ROWS.get(source.transform, source.transform)
    form = transform if by_rows or transform == "stack" else "none"
    named = tuple(f"{_PREFIX}{module}.{suffix}" for module in modules)
    of_leaf = Source(name=name, shape=shape, hf_names=named, transform=form, sections=source.sections)
    return PeftTensor(source=of_leaf, modules=modules, leaf=leaf, transposed=table)


def peft_config(
    config: LoraConfig,
    *,
    base: str | None,
    targets: Iterable[str],
    whole: Iterable[str],
    modules: Iterable[str],
    transposed: bool,
    tied: bool = False,
    matrices: Iterable[str] = (),
) -> dict[str, Any]:
    """Return the file's content.

    Args:
        config: the resolved configuration of the run.
        base: name or path of the base model.
        targets: modules of transformers with an update.
        whole: modules that train whole.
        modules: all that could have an update.
        transposed: whether the base's matrices are stored as [in, out].
        tied: whether embedding and head train whole as one matrix.
        matrices: weights with an update that are targets by their own names.
    """
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        **{theirs: getattr(config, ours) for theirs, ours in _SAME.items()},
        **{key: dict(getattr(config, key)) for key in _PATTERNS},
        "lora_dropout": config.lora_dropout,
        "bias": config.biases,
        "target_modules": shortened(targets, modules),
        "target_parameters": sorted(matrices) or None,
        "modules_to_save": sorted(whole) or None,
        "ensure_weight_tying": tied,
        "init_lora_weights": True if config.init_lora_weights == "default" else config.init_lora_weights,
        "fan_in_fan_out": transposed,
        "inference_mode": True,
    }


def shortened(targets: Iterable[str], modules: Iterable[str]) -> list[str]:
    """Return the last words of ``targets``, where all modules that end so are among them; else whole paths."""
    chosen, by_leaf = set(targets), defaultdict(set)
    for module in {*modules, *chosen}:
        by_leaf[module.rpartition(".")[2]].add(module)
    short = {leaf for leaf, ending in by_leaf.items() if ending <= chosen and not leaf.isdigit()}
    return sorted(short | {module for module in chosen if module.rpartition(".")[2] not in short})


def differences(lora: LoraConfig, section: Mapping[str, Any]) -> Iterator[str]:
    """Yield where an adapter of the section ``section`` computes something else than ``lora`` describes."""
    theirs = lora.changed(**{key: section[key] for key in (*_SAME.values(), *_PATTERNS)})
    if any(getattr(config, key) for config in (lora, theirs) for key in _PATTERNS):
        for path in section["target_modules"]:
            there, here = ((config.rank_of(path), config.alpha_of(path)) for config in (theirs, lora))
            if there != here:
                yield "rank and alpha of '{}' are {} and {} there and {} and {} here".format(path, *there, *here)
        yield from unequal(("use_rslora", "use_dora"), section, lora)
    else:
        yield from unequal(_SAME.values(), section, lora)


def unequal(keys: Iterable[str], section: Mapping[str, Any], lora: LoraConfig) -> Iterator[str]:
    """Yield which of ``keys``, and which start that the base depends on, are others in ``section`` than in ``lora``."""
    values = lora.model_dump()
    for key in keys:
        if section.get(key) != values[key]:
            yield f"{key} is {section.get(key)} there and {values[key]} here"
    start = section.get("init_lora_weights", "default")
    if (start == "pissa") != (lora.init_lora_weights == "pissa"):
        yield f"init_lora_weights is {start} there and {lora.init_lora_weights} here"


def is_peft(path: Path) -> bool:
    """Return whether ``path`` is such a directory, by its names alone."""
    return (path / CONFIG).is_file()


def write_peft(
    directory: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, PeftTensor],
    read: Callable[[Sequence[str]], Iterable[torch.Tensor]],
    *,
    base: str,
    files: Mapping[str, bytes] | None = None,
) -> int:
    """Write a directory; returns its bytes of weights.

    Args:
        directory: is made.
        config: of :func:`peft_config`.
        tensors: of :func:`peft_tensors`.
        read: gives the whole parameters of names, in order.
        base: digest of the frozen weights.
        files: further ones by name, such as the tokenizer's.
    """
    parts = [[name] if tensor.start is None else [name, tensor.start] for name, tensor in tensors.items()]
    values = iter(read([name for names in parts for name in names]))
    weights = ([next(values) for _ in names] for names in parts)
    written = dict(
        item for tensor, whole in zip(tensors.values(), weights, strict=True) for item in tensor.write(*whole)
    )
    directory.mkdir(parents=True, exist_ok=True)
    with replacing(directory / WEIGHTS) as file:
        file.write(save(written, metadata={"format": "pt", _BASE: base}))
    for name, content in (files or {}).items():
        with replacing(directory / name) as file:
            file.write(content)
    replace_text(directory / CONFIG, json.dumps(dict(config), indent=2) + "\n")
    return sum(tensor.nbytes for tensor in written.values())


def read_peft(
    directory: Path, tensors: Mapping[str, PeftTensor], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, torch.Tensor], str]:
    """Return the trained parameters by our names, whole and on the host, and the digest of the base weights.

    The digest is empty if peft wrote the file.

    Raises:
        AdapterFileDamaged: a file is missing or broken.
        AdapterDiffers: embedding and head are one matrix here, but two in the file.
        WeightsDoNotFit: the tensors in the file differ from those that ``tensors`` describes.
    """
    with opened_weights(directory) as file:
        stored, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    expected = {part for tensor in tensors.values() for part in tensor.source.hf_names}
    base_layers = {name for name in stored if name.endswith(".base_layer.weight")}  # peft saves them with embeddings
    for tensor in tensors.values():
        if tensor.tied_name is not None:  # a matrix that two modules share trains in both here
            names = (*tensor.source.hf_names, tensor.tied_name)
            shared = [stored[name] for name in names if name in stored]
            if shared and (len(shared) < len(names) or not all(torch.equal(shared[0], other) for other in shared)):
                difference = f"embedding and head share '{tensor.source.name}' here, and it trained them apart"
                raise AdapterDiffers(where=str(directory), differences=[difference], remedies=(MERGE,))
    expected |= {tensor.tied_name for tensor in tensors.values() if tensor.tied_name is not None}
    missing, extra = sorted(expected - stored.keys()), sorted(stored.keys() - expected - base_layers)
    if missing or extra:
        raise WeightsDoNotFit(missing=missing, extra=extra, shapes=[])
    values = {name: tensor.read(stored.__getitem__) for name, tensor in tensors.items()}
    wrong = [
        f"{name}: {tuple(value.shape)} instead of {shapes[name]}"
        for name, value in values.items()
        if tuple(value.shape) != shapes[name]
    ]
    if wrong:
        raise WeightsDoNotFit(missing=[], extra=[], shapes=wrong)
    return values, metadata.get(_BASE, "")


@contextmanager
def opened_weights(directory: Path) -> Iterator[Any]:
    """Open the weights of a directory.

    Raises:
        AdapterFileDamaged: they are missing or broken, not a regular file, or a link out of the directory.
    """
    path = directory / WEIGHTS
    try:
        require_inside(path, directory)
        require_fetched(path)
        with safe_open(path, framework="pt", device=HOST.type) as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise AdapterFileDamaged(path=str(path), reason=str(error)) from error


def read_config(directory: Path) -> dict[str, Any]:
    """Return the content of ``adapter_config.json``.

    Raises:
        AdapterFileDamaged: it describes no LoRA, or has a value that no such file has.
        HFFileMissing, HFFileDamaged: of the file.
    """
    content = read_json(directory, CONFIG)
    reason = unusable(content, weights=None)
    base, matrices = content.get("base_model_name_or_path"), content.get("target_parameters") or []
    tables = {key: content.get(key) or {} for key in _PATTERNS}
    numbers = {key: table.values() if isinstance(table, dict) else [None] for key, table in tables.items()}
    odd = [key for key, values in numbers.items() if not all(isinstance(value, int | float) for value in values)]
    if content.get("peft_type") != "LORA":
        reason = f"its peft_type is {content.get('peft_type')!r}, not 'LORA'"
    elif not isinstance(base, str | None):
        reason = f"base_model_name_or_path is {base!r}, not a path or a name"
    elif odd:
        reason = f"{odd[0]} is {content[odd[0]]!r}, not numbers by name"
    elif not isinstance(matrices, list) or not all(isinstance(name, str) for name in matrices):
        reason = f"target_parameters is {matrices!r}, not a list of names"
    if reason is not None:
        raise AdapterFileDamaged(path=str(directory / CONFIG), reason=reason)
    return content


def section_for(directory: Path, builder: ModelBuilder, *, builds: bool = True) -> dict[str, Any]:
    """Return the section ``adapter`` of a run that begins with a directory of peft: its targets are the modules of
    ``builder`` that the file has tensors for. ``builds``: a model of that section follows, so that matrices that are
    too small for the ranks are an error.

    Raises:
        AdapterDiffers: it has what no section here describes.
        AdapterFileDamaged: a file is missing or broken, or names a rank that its matrices do not have.
    """
    theirs = read_config(directory)
    unsupported = dict[str, str]()
    start = theirs.get("init_lora_weights", True)
    if start not in _STARTS:
        remedy = _CONVERT if str(start).lower().startswith(_CONVERTED) else MERGE
        unsupported[f"init_lora_weights is {start!r}, which is more than a start"] = remedy
    for key in _UNREAD:
        # Weights of layers have the same updates under either way to name them.
        layers = key == "target_parameters" and all(name.endswith(_LAYERS) for name in theirs.get(key) or ())
        if theirs.get(key) and not layers:
            unsupported[f"it uses {key}, which is not implemented"] = MERGE
    patterns = {key: {_literal(name): value for name, value in (theirs.get(key) or {}).items()} for key in _PATTERNS}
    for key in _PATTERNS:
        for name in theirs.get(key) or {}:
            if _literal(name) is None:
                unsupported[f"{key} has {name!r}, a regular expression, which is not run"] = _SPELL_OUT.format(key=key)
    if unsupported:
        raise AdapterDiffers(where=str(directory), differences=[*unsupported], remedies=tuple(unsupported.values()))
    section = {ours: theirs.get(name, _THEIR_DEFAULTS[name]) for name, ours in _SAME.items()}
    by_name = {name: source for source in sources(builder) for name in source.hf_names}
    targets, whole = dict[str, dict[str, Any]](), dict[str, None]()
    with opened_weights(directory) as file:
        for name in file.keys():  # noqa: SIM118 - no mapping
            inner = name.removeprefix(_PREFIX)
            leaves = {*_IN_PEFT.values(), *_EMBEDDING_IN_PEFT.values()}
            leaf = next((leaf for leaf in leaves if inner.endswith(f".{leaf}")), None)
            updated = leaf is not None
            module = inner.removesuffix(f".{leaf}") if updated else inner.rpartition(".")[0].removesuffix(".base_layer")
            if not updated and name.endswith(".bias"):  # those of the file's ``bias``, or of a module that is whole
                continue
            source = by_name.get(f"{module}.weight")
            ours = (f"{module}.weight" if source is None else source.name).removesuffix(".weight")
            if not updated:
                whole[ours] = None
                continue
            # Patterns are of the name by which peft finds the target, be it a module or a weight.
            weight = f"{module}.weight"
            target = weight if any(ends_in(weight, name) for name in theirs.get("target_parameters") or ()) else module
            values = {
                key: next((value for end, value in patterns[key].items() if _is_end(target, end)), section[of_all])
                for key, of_all in _PATTERNS.items()
            }
            if targets.setdefault(ours, values) != values:
                reason = f"experts of '{ours}' have different ranks or alphas"
                raise AdapterDiffers(where=str(directory), differences=[reason], remedies=(MERGE,))
            if builds and source is not None and ("lora_A" in name or "lora_embedding_A" in name):
                elements, rank = math.prod(file.get_slice(name).get_shape()), values["rank_pattern"]
                if type(rank) is int and rank * min(source.shape[-2:]) > elements:
                    reason = f"r is {rank}, and '{name}' has {elements} elements"
                    raise AdapterFileDamaged(path=str(directory / CONFIG), reason=reason)
    others = {
        key: {path: values[key] for path, values in targets.items() if values[key] != section[of_all]}
        for key, of_all in _PATTERNS.items()
    }
    return {
        "name": "lora",
        **section,
        "lora_dropout": theirs.get("lora_dropout", 0.0),
        "lora_bias": theirs.get("bias", "none"),
        **{key: _by_ends(values, targets) for key, values in others.items()},
        **({"init_lora_weights": start} if start == "pissa" else {}),
        "target_modules": [*targets],
        "modules_to_save": [name for name in whole if name not in targets],
        "load_lora_from_ckpt": True,
        "lora_save_dir": str(directory),
    }


def _literal(pattern: str) -> str | None:
    """Return the name in a pattern of peft, which matches ``(.*\\.)?PATTERN$``; None for a regular expression.

    A name that begins with ``^`` is a whole path.
    """
    name = pattern.removesuffix("$")
    for beginning in ("(.*\\.)?", ".*\\.", ".*."):
        name = name.removeprefix(beginning)
    name = name.replace("\\.", ".").replace("\\-", "-")
    return name if re.fullmatch(r"\^?[\w.-]+", name) else None


def _is_end(target: str, name: str | None) -> bool:
    """Return whether what :func:`_literal` returned matches ``target``."""
    return name is not None and (target == name[1:] if name.startswith("^") else ends_in(target, name))


def _by_ends(values: Mapping[str, Any], modules: Iterable[str], weights: Container[str] = ()) -> dict[str, Any]:
    """Return ``values`` of some of ``modules`` by the ends of their paths that no other module has.

    ``weights`` are those of the modules that peft finds by the name of their weight.
    """
    by_value, every = defaultdict[tuple[Any, str], list[str]](list), [*modules]
    for module, value in values.items():
        by_value[value, ".weight" if module in weights else ""].append(module)
    return {f"{name}{end}": value for (value, end), chosen in by_value.items() for name in shortened(chosen, every)}


def describe(
    builder: ModelBuilder, lora: LoraConfig, trained: Mapping[str, tuple[int, ...]], *, base: str | None
) -> tuple[dict[str, Any], dict[str, PeftTensor]]:
    """Return the content of ``adapter_config.json``, and what each trained parameter is in the other file.

    With experts among the targets the dropout is 0 there: peft opens no others. Of a model with experts, peft takes
    every target module that is called as a matrix of theirs for one; layers of that name are target parameters.

    ``trained`` has the shapes of what trains and of its frozen initial values, by name; ``base`` is what the file calls
    the base.

    Raises:
        NoPeftForm: a part of what trains has none.
    """
    tensors = peft_tensors(builder, trained, tables_of(builder))
    adaptable, of_base = adaptable_names(builder), sources(builder)
    updates = {tensor.leaf.base: tensor for tensor in tensors.values() if tensor.leaf is not None}
    of_experts = {name for name in updates if not name.endswith(".weight")}
    for name in sorted(of_experts):
        owner, _, matrix = name.rpartition(".")
        if matrix in _PAIR and not all(f"{owner}.{other}" in updates for other in _PAIR):
            reason = "peft holds gate_proj and up_proj of an expert as one, and has no update of one alone"
            raise NoPeftForm(parameter=name, reason=reason)
        if (lora.rank_of(name), lora.alpha_of(name)) != (lora.lora_rank, lora.lora_alpha):
            raise NoPeftForm(parameter=name, reason="peft has experts of lora_rank and lora_alpha alone")
    # Layers that are not experts and are called as a matrix of theirs.
    theirs = {source.name: [name.removesuffix(".weight") for name in source.hf_names] for source in of_base}
    ends = {theirs[source.name][0].rpartition(".")[2] for source in of_base if source.transform == "stack"}
    others = (theirs[source.name] for source in of_base if source.transform != "stack")
    layers = {module for names in others if names[0].rpartition(".")[2] in ends for module in names}
    modules = {module: name.removesuffix(".weight") for name, tensor in updates.items() for module in tensor.modules}
    matrices = {f"{module}.weight" for module in modules if module in layers}
    if matrices and lora.use_dora:
        raise NoPeftForm(parameter=min(matrices), reason="peft takes a layer of that name for an expert, without DoRA")
    ranks = {module: rank for module, path in modules.items() if (rank := lora.rank_of(path)) != lora.lora_rank}
    alphas = {module: alpha for module, path in modules.items() if (alpha := lora.alpha_of(path)) != lora.lora_alpha}
    saved = lora.changed(rank_pattern=_by_ends(ranks, modules, layers), alpha_pattern=_by_ends(alphas, modules, layers))
    if any(tensor.start is not None for tensor in tensors.values()):  # of twice the rank, with the same scaling
        factor = math.sqrt(2) if lora.use_rslora else 2
        saved = saved.changed(
            init_lora_weights="default",
            lora_rank=2 * lora.lora_rank,
            lora_alpha=factor * lora.lora_alpha,
            rank_pattern={name: 2 * rank for name, rank in saved.rank_pattern.items()},
            alpha_pattern={name: factor * alpha for name, alpha in saved.alpha_pattern.items()},
        )
    config = peft_config(
        saved.changed(lora_dropout=0.0) if of_experts or matrices else saved,
        base=base,
        targets=modules.keys() - layers,
        whole={
            module
            for name, tensor in tensors.items()
            if tensor.leaf is None and not name.endswith(".bias")
            for module in tensor.modules
        },
        modules={module for name in theirs.keys() & adaptable for module in theirs[name]} - layers,
        transposed=any("transpose" in source.transform for source in of_base if source.name in updates),
        tied=any(tensor.tied_name is not None for tensor in tensors.values()),
        matrices=matrices,
    )
    return config, tensors
