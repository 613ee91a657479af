"""Writing an adapter as a directory that peft loads."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nxdt_core.checkpoint.format.hf_source import HFSource
from nxdt_core.errors.models import HFNotWritable
from nxdt_core.hf.key_map import Source, sources
from nxdt_core.protocols.model import ModelBuilder
from nxdt_core.train import build
from nxdt_core.train.weights.export import tokenizer_files
from nxdt_core.train.weights.saved_config import base_step, locate, named_config
from nxdt_plugin_lora.config import LoraConfig
from nxdt_plugin_lora.errors import NoPeftForm
from nxdt_plugin_lora.peft_files import peft_config, write_peft
from nxdt_plugin_lora.peft_names import PeftTensor, peft_tensors
from nxdt_plugin_lora.saved_run import SavedLora, open_saved
from nxdt_plugin_lora.targets import adaptable_names, tables_of

_PAIR = ("gate_proj", "up_proj")


def check_pairs(updated: Collection[str]) -> None:
    """See that experts have an update of both matrices of a pair, or of none.

    Args:
        updated: names of the experts' matrices with an update.

    Raises:
        NoPeftForm: one has one alone.
    """
    for name in sorted(updated):
        owner, _, matrix = name.rpartition(".")
        if matrix in _PAIR and not all(f"{owner}.{other}" in updated for other in _PAIR):
            reason = "peft holds gate_proj and up_proj of an expert as one, and has no update of one alone"
            raise NoPeftForm(parameter=name, reason=reason)


def modules_named_like_experts(sources: Iterable[Source]) -> set[str]:
    """Return the modules of transformers that are not experts and end in the name of an expert's matrix."""
    found = list(sources)
    matrices = {_last(each) for each in found if each.transform == "stack"}
    layers = [each for each in found if each.transform != "stack" and _last(each) in matrices]
    return {name.removesuffix(".weight") for each in layers for name in each.hf_names}


def _last(source: Source) -> str:
    return source.hf_names[0].removesuffix(".weight").rpartition(".")[2]


_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedLora:
    """Result of an export."""

    source: str
    """Address of the checkpoint."""
    target: str
    step: int
    base: str | None
    """Base model that ``adapter_config.json`` names."""
    updates: int
    """Matrices with an update."""
    size_bytes: int


def export_lora(
    source: str,
    target: str,
    *,
    base_model: str | None = None,
    config: str | None = None,
    trusted: Sequence[str] = (),
) -> ExportedLora:
    """Write the adapter as ``PeftModel.from_pretrained(base, target)`` reads it, with tokenizer and chat template.

    Args:
        source: a checkpoint, or the root of a run's checkpoints (the newest good one is taken).
        target: a directory that is empty or not there yet.
        base_model: what the files say of the base; None: the Hugging Face directory that the run began with, or whose
            import it began with, if any.
        config: a YAML file or ``recipe:NAME`` that decides in place of the configuration that the checkpoint keeps.
        trusted: files of public keys, one of which must have signed the checkpoint; empty: those of
            ``checkpoint.sign.trusted`` of ``config``.

    Raises:
        NoAdapterHere: the run had none.
        HFExchangeUnsupported, NoPeftForm: transformers has no such model, or peft no form for it.
        HFNotWritable: ``target`` holds something.
    """
    directory = Path(target)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise HFNotWritable(directory=target)
    own, keys = named_config(config, trusted)
    saved = open_saved(*locate(source, own), needs_base=False, config=own, trusted=keys)
    base = base_model or _source_directory(saved)
    written, tensors = describe(build.model_builder(saved.run.config), saved.lora, saved.trained, base=base)
    if written["lora_dropout"] != saved.lora.lora_dropout:
        _log.warning(
            "adapter_config.json says lora_dropout 0: peft opens no experts with another one, nor layers of their names"
        )
    files, notes = tokenizer_files(saved.run, build.tokenizer(saved.run.config))
    for note in notes:
        _log.warning(note)
    size_bytes = write_peft(directory, written, tensors, saved.read, base=saved.manifest.facts.base, files=files)
    return ExportedLora(
        source=saved.uri,
        target=target,
        step=saved.manifest.step,
        base=base,
        updates=len(saved.updated),
        size_bytes=size_bytes,
    )


def describe(
    builder: ModelBuilder, lora: LoraConfig, trained: Mapping[str, tuple[int, ...]], *, base: str | None
) -> tuple[dict[str, Any], dict[str, PeftTensor]]:
    """Return the content of ``adapter_config.json``, and what each trained parameter is in the other file.

    With experts among the targets the dropout is 0 there: peft opens no others. Of a model with experts, peft takes
    every target module that is called as a matrix of theirs for one; layers of that name are target parameters.

    Args:
        builder: builder of the base model.
        lora: section of the run.
        trained: shapes of what trains, by name.
        base: name or path of the base, for peft.

    Raises:
        NoPeftForm: a part of what trains has none.
    """
    tensors = peft_tensors(builder, trained, tables_of(builder))
    adaptable, found = adaptable_names(builder), sources(builder)
    updates = [each for each in tensors.values() if each.leaf is not None]
    updated = {each.leaf.base for each in updates if each.leaf is not None}
    of_experts = {name for name in updated if not name.endswith(".weight")}
    check_pairs(of_experts)
    layers = modules_named_like_experts(found)
    matrices = {f"{module}.weight" for each in updates for module in each.modules if module in layers}
    if matrices and lora.use_dora:
        raise NoPeftForm(parameter=min(matrices), reason="peft takes a layer of that name for an expert, without DoRA")
    config = peft_config(
        lora.changed(lora_dropout=0.0) if of_experts or matrices else lora,
        base=base,
        targets={module for each in updates for module in each.modules if module not in layers},
        whole={
            module
            for name, each in tensors.items()
            if each.leaf is None and not name.endswith(".bias")
            for module in each.modules
        },
        modules={hf.removesuffix(".weight") for each in found if each.name in adaptable for hf in each.hf_names}
        - layers,
        transposed=any("transpose" in each.transform for each in found if each.name in updated),
        tied=any(each.twin is not None for each in tensors.values()),
        matrices=matrices,
    )
    return config, tensors


def _source_directory(saved: SavedLora) -> str | None:
    said = HFSource.of_facts(saved.manifest.facts.hf)
    return None if said is None or base_step(saved.manifest) else said.path  # an import has step 0; later ones trained
