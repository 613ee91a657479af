"""Names and forms of an adapter's tensors in the files of peft, derived from the key map of the model's builder.

An update is stored with the matrix that it belongs to: what the key map does to the rows of that is done to
those of ``lora_B`` and of DoRA's norms, and ``lora_A`` is as it is here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from nxdt_core.hf.key_map import Source, sources
from nxdt_core.protocols.model import ModelBuilder
from nxdt_plugin_lora.errors import NoPeftForm

_PREFIX = "base_model.model."
_HEAD = "lm_head.weight"
"""Name of a head that shares the embedding's weight and therefore has no separate tensor."""
_RENAMED = ".block_sparse_moe."
"""Part of names in Mixtral's files. It is ``.mlp.`` in memory, where peft looks for modules that train whole."""
_ROWS = {"transpose": "none", "interleave_transpose": "interleave"}
"""Transform → its effect on rows alone, where the two differ."""
_IN_PEFT = {"lora_A": "lora_A.weight", "lora_B": "lora_B.weight", "lora_magnitude": "lora_magnitude_vector"}
_EMBEDDING_IN_PEFT = {**_IN_PEFT, "lora_A": "lora_embedding_A", "lora_B": "lora_embedding_B"}


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateParameter:
    """A parameter of an update."""

    base: str
    """Global name of the matrix that is updated."""
    kind: str
    """``lora_A``, ``lora_B`` or ``lora_magnitude``."""


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
    twin: str | None = None
    """Name of the same tensor again, where two modules share it."""

    def write(self, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of the file."""
        for part in self.source.tensors():
            found = part.of(tensor[part.box.within(part.box.whole(part.parameter_shape))])
            yield part.name, (found.t() if self.transposed else found).contiguous()
            if self.twin is not None:
                yield self.twin, found.clone()

    def read(self, fetch: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """Return the parameter, of tensors that ``fetch`` gives by name."""
        return self.source.read(lambda name: fetch(name).t() if self.transposed else fetch(name))


def base_of(name: str) -> UpdateParameter | None:
    """Return what the parameter ``name`` of an update belongs to; None for one of the base."""
    owner, _, kind = name.rpartition(".")
    if kind not in _IN_PEFT:
        return None
    layer, _, last = owner.rpartition(".")
    if last == "update":
        return UpdateParameter(base=f"{layer}.weight", kind=kind)
    return UpdateParameter(base=f"{layer.removesuffix('.updates')}.{last}", kind=kind)


def module_of(name: str) -> tuple[str, bool]:
    """Return the module of transformers that a tensor of the file belongs to, and whether it is of an update."""
    inner = name.removeprefix(_PREFIX)
    for suffix in {*_IN_PEFT.values(), *_EMBEDDING_IN_PEFT.values()}:
        if inner.endswith(f".{suffix}"):
            return inner.removesuffix(f".{suffix}"), True
    return inner.rpartition(".")[0].removesuffix(".base_layer"), False


def peft_tensors(
    builder: ModelBuilder, shapes: Mapping[str, tuple[int, ...]], embeddings: Iterable[str]
) -> dict[str, PeftTensor]:
    """Return the trained parameters of a model by name.

    Args:
        builder: builder of the model, without adapters.
        shapes: shape of each trained parameter, by name.
        embeddings: names of the tables that are looked up.

    Raises:
        HFExchangeUnsupported: the builder has no key map.
        NoPeftForm: an update of a matrix that is several in transformers, or weights that peft cannot train whole.
    """
    of_base = {source.name: source for source in sources(builder)}
    of_base |= {user: of_base[owner] for owner, user in builder.plan().tied}
    leaves = {name: base_of(name) for name in shapes}
    updated = {leaf.base.rpartition(".")[0] for leaf in leaves.values() if leaf is not None}
    tables = frozenset(embeddings)
    found = {}
    for name, shape in shapes.items():
        leaf = leaves[name]
        if leaf is None:
            found[name] = _whole(of_base[name], updated, dict(builder.plan().tied))
        else:
            source = _named_for(leaf, of_base[leaf.base], dict(builder.plan().tied))
            found[name] = _update(name, shape, leaf, source, table=leaf.base in tables)
    return found


def _named_for(leaf: UpdateParameter, source: Source, tied: Mapping[str, str]) -> Source:
    """Name a head that shares the embedding's weight after its own module, which has no tensor in the base."""
    if leaf.base == tied.get(source.name):
        return replace(source, hf_names=(_HEAD,))
    return source


def _whole(source: Source, updated: set[str], tied: Mapping[str, str]) -> PeftTensor:
    """A base parameter; the bias of a layer with an update is below that layer's ``base_layer``."""
    if len(source.shape) == 3:
        raise NoPeftForm(parameter=source.name, reason="peft trains no experts whole")
    if source.hf_names == (source.name.removesuffix(".weight"),):
        raise NoPeftForm(parameter=source.name, reason="peft trains modules whole, and there it is part of one")
    if any(_RENAMED in name for name in source.hf_names):
        raise NoPeftForm(parameter=source.name, reason="transformers opens its module under another name")
    owner = source.name.rpartition(".")[0]
    if source.name in tied:
        return _shared(source, {owner, tied[source.name].rpartition(".")[0]} & updated)
    modules = tuple(name.rpartition(".")[0] for name in source.hf_names)
    beneath = ".base_layer" if owner in updated else ""
    names = tuple(
        f"{_PREFIX}{module}{beneath}.{name.rpartition('.')[2]}"
        for module, name in zip(modules, source.hf_names, strict=True)
    )
    return PeftTensor(source=replace(source, hf_names=names), modules=modules, leaf=None)


def _shared(source: Source, updated: set[str]) -> PeftTensor:
    """An embedding that is the head too: peft keeps a copy for each."""
    if updated:
        raise NoPeftForm(parameter=source.name, reason="embedding and head share it, and one of them has an update")
    names = (*source.hf_names, _HEAD)
    return PeftTensor(
        source=replace(source, hf_names=tuple(f"{_PREFIX}{name}" for name in source.hf_names)),
        modules=tuple(name.rpartition(".")[0] for name in names),
        leaf=None,
        twin=f"{_PREFIX}{_HEAD}",
    )


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
