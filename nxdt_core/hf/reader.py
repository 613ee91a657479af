"""The weights of a Hugging Face directory, read through a builder's key map, one tensor at a time."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch.nn import functional

from nxdt_core.api import ModelComponent
from nxdt_core.checkpoint.format.hf_source import CONFIG, read_json
from nxdt_core.checkpoint.format.tensor_index import DTYPES
from nxdt_core.config.hub import complete, name_of
from nxdt_core.config.huggingface import architectures_of, unusable, weights_in
from nxdt_core.distributed.devices import HOST
from nxdt_core.errors.checkpoints import ArchitectureUnread, WeightsPickled
from nxdt_core.errors.models import HFFileDamaged, HFFileMissing, WeightsDoNotFit, WeightsUnusable
from nxdt_core.hf.key_map import Source, sources
from nxdt_core.kernel import Kernel
from nxdt_core.models.patterns import matches_any
from nxdt_core.protocols.format import CheckpointReader
from nxdt_core.protocols.model import ModelBuilder
from nxdt_core.protocols.tensor_shards import Listing, ShardInfo, TensorKey, TensorSlice
from nxdt_core.system.regular_files import require_fetched, require_inside

BLOCKS, SCALES = "_blocks", "_scales"
"""Endings of the names of the two tensors."""

_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values by their three bits; the fourth is the sign."""
_BIAS = 127
"""Bias of the exponents."""


WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PICKLES = ("pytorch_model.bin.index.json", "pytorch_model*.bin", "consolidated*.pth")
_TOKENIZERS = {"tokenizer.json": ("huggingface", "."), "tokenizer.model": ("sentencepiece", "tokenizer.model")}
"""File that shows which tokenizer a directory has → our component, and what its key ``model`` names."""


@dataclass(frozen=True, slots=True)
class PackedMatrices:
    """One tensor of an open file of safetensors, made of two: has the methods of a file and of a slice of it."""

    blocks: Any
    """Open file that has the tensor ``name`` + ``_blocks``."""
    scales: Any
    """Open file that has ``name`` + ``_scales``."""
    name: str

    def get_slice(self, name: str) -> PackedMatrices:
        """Return what has shape and dtype."""
        return self

    def get_dtype(self) -> str:
        """Return the dtype that is read."""
        return "BF16"

    def get_shape(self) -> list[int]:
        """Return [experts, in, out]."""
        *outer, rows, groups, half = self.blocks.get_slice(f"{self.name}{BLOCKS}").get_shape()
        return [*outer, groups * half * 2, rows]

    def get_tensor(self, name: str) -> torch.Tensor:
        """Return the matrices in bfloat16, a transposed view."""
        blocks = self.blocks.get_tensor(f"{self.name}{BLOCKS}")
        scales = self.scales.get_tensor(f"{self.name}{SCALES}")
        signed = torch.tensor((*_POSITIVE, *(-number for number in _POSITIVE)), dtype=torch.bfloat16, device=HOST)
        byte = torch.arange(256, device=HOST)
        pairs = torch.stack((signed[byte % 16], signed[byte // 16]), -1)
        factors = torch.exp2(scales.float() - _BIAS).bfloat16()
        *experts, inputs, outputs = self.get_shape()
        matrices = torch.empty(*experts, outputs, inputs, dtype=torch.bfloat16, device=HOST)
        for matrix, packed, factor in zip(matrices, blocks, factors, strict=True):  # an expert at a time
            numbers = functional.embedding(packed.int(), pairs).flatten(-2)  # [out, in / 32, 32]
            torch.mul(numbers, factor.unsqueeze(-1), out=matrix.view(numbers.shape))
        return matrices.mT


class HFWeights:
    """The weights in a directory; a context manager, which keeps the files open.

    A directory with only a base model, such as the released GPT-2, omits the first part of the whole model's names:
    ``h.0.ln_1.weight`` there is ``transformer.h.0.ln_1.weight`` here.
    """

    def __init__(self, directory: Path, *, fill_rows: bool = False) -> None:
        """``fill_rows``: as in :class:`~nxdt_core.protocols.format.CheckpointReader`."""
        self._directory = directory
        self._fill_rows = fill_rows
        self._stack = ExitStack()
        self._located: dict[str, tuple[Path, Any]] = {}
        """File that holds each tensor, by name, and the same, opened."""
        self._index: dict[str, str] = {}
        """File that should hold each tensor, by name; empty without an index."""

    def __enter__(self) -> Self:
        try:
            for file in self._files():
                self._open(file)
            for name, file in self._index.items():
                located = self._located.get(name)
                if located is not None and located[0].name != file:  # it may belong to other weights
                    reason = f"it says that '{name}' is in '{file}', and that is in '{located[0].name}'"
                    raise HFFileDamaged(path=str(self._directory / INDEX), reason=reason)
            self._unpack()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def sources(self, builder: ModelBuilder) -> list[Source]:
        """Return where the parameters of the builder's model come from, once names and shapes are those of its model.

        Additional tensors are allowed where the builder ignores them and no tied matrix has other values in them.

        Raises:
            WeightsDoNotFit: names or shapes differ.
            WeightsUnusable: the head of a tied model is not its embedding.
        """
        wanted = []
        for source in sources(builder):
            name = source.hf_names[0]
            if name in builder.hf_may_lack and name not in self._located:
                continue
            if self._fill_rows and source.shape[0] == builder.vocab_size and self._file_name(name) in self._located:
                rows, *rest = self._slice(name).get_shape()
                plain = source.transform in ("none", "pad") and tuple(rest) == source.shape[1:]
                if plain and 0 < rows < source.shape[0]:
                    source = replace(source, transform="pad", sections=(rows,))
            wanted.append(source)
        patterns = builder.hf_ignored
        shapes = {tensor.name: tensor.shape for source in wanted for tensor in source.tensors()}
        missing = sorted(name for name in shapes if self._file_name(name) not in self._located)
        ignored = [*patterns, *map(_without_prefix, patterns)]
        used = {self._file_name(name) for name in shapes}
        extra = sorted(name for name in self._located.keys() - used if not matches_any(ignored, name))
        wrong = [
            f"{name}: {stored} instead of {shape}"
            for name, shape in shapes.items()
            if name not in missing and (stored := tuple(self._slice(name).get_shape())) != shape
        ]
        if missing or extra or wrong:
            directory = str(self._directory)
            raise WeightsDoNotFit(missing=missing, extra=extra, shapes=wrong, directory=directory, says_sizes=True)
        owners = {owner for owner, _ in builder.plan().tied}
        copies = [source.hf_names[0] for source in wanted if source.name in owners]
        for name, owner in product(self._located.keys() - used, copies):
            alike = self._slice(name).get_shape() == self._slice(owner).get_shape()
            if alike and not torch.equal(self._get(name), self._get(owner)):
                reason = f"it is not '{owner}', and the model has one matrix for both (tie_word_embeddings)"
                advice = f"Set tie_word_embeddings to false in config.json to keep both, or remove '{name}'."
                raise WeightsUnusable(tensor=name, reason=reason, advice=advice, path=str(self._directory))
        return wanted

    def dtype_of(self, source: Source) -> torch.dtype:
        """Return the dtype in which :meth:`read` returns the parameter.

        Raises:
            HFFileDamaged: a tensor has a dtype that torch or a checkpoint does not have.
        """
        dtypes: list[torch.dtype] = []
        for name in source.hf_names:
            stored = self._slice(name).get_dtype()
            if stored not in DTYPES:
                path = str(self._located[self._file_name(name)][0])
                raise HFFileDamaged(path=path, reason=f"'{name}' has the unknown dtype {stored!r}")
            dtypes.append(getattr(torch, DTYPES[stored]))
        return functools.reduce(torch.promote_types, dtypes)

    def read(self, source: Source) -> torch.Tensor:
        """Return one parameter, on the host.

        Raises:
            WeightsUnusable: it holds integers, NaN or infinity.
        """
        try:
            return source.read(self._get)
        except WeightsUnusable as error:
            error.path = str(self._directory)
            raise

    def _files(self) -> list[str]:
        complete(self._directory)
        if (self._directory / WEIGHTS).is_file():  # before an index, as in transformers
            return [WEIGHTS]
        if (self._directory / INDEX).is_file():
            index = read_json(self._directory, INDEX).get("weight_map")
            if not isinstance(index, dict) or not all(isinstance(file, str) for file in index.values()):
                raise HFFileDamaged(
                    path=str(self._directory / INDEX), reason="it has no 'weight_map' of names to files"
                )
            self._index = {name: Path(file).name for name, file in index.items()}  # files next to the index only
            return sorted(set(self._index.values()))
        pickles = sorted(path.name for pattern in _PICKLES for path in self._directory.glob(pattern))
        if pickles:
            _require_readable(self._directory / pickles[0])
            raise WeightsPickled(path=str(self._directory), file=pickles[0])
        return [WEIGHTS]

    def _open(self, file: str) -> None:
        path = self._directory / file
        try:
            exists = path.is_file()
        except OSError as error:  # a name that is too long
            raise HFFileDamaged(path=str(self._directory / INDEX), reason=str(error)) from error
        if not exists:
            raise HFFileMissing(directory=str(self._directory), wanted=f"'{file}'")
        _require_readable(path)
        try:
            handle = self._stack.enter_context(safe_open(path, framework="pt", device=HOST.type))
        except (SafetensorError, OSError) as error:
            raise HFFileDamaged(path=str(path), reason=str(error)) from error
        for name in handle.keys():  # noqa: SIM118 - no mapping
            if name not in self._located or self._index.get(name) == file:
                self._located[name] = (path, handle)

    def _unpack(self) -> None:
        """Let matrices of four bits be tensors like others."""
        for blocks in [name for name in self._located if name.endswith(BLOCKS)]:
            name = blocks.removesuffix(BLOCKS)
            if f"{name}{SCALES}" not in self._located:
                continue
            (path, handle), (_, other) = self._located.pop(blocks), self._located.pop(f"{name}{SCALES}")
            bytes_, scales = handle.get_slice(blocks), other.get_slice(f"{name}{SCALES}")
            shape, dtypes = bytes_.get_shape(), {bytes_.get_dtype(), scales.get_dtype()}
            if len(shape) != 4 or shape[:-1] != scales.get_shape() or dtypes != {"U8"}:
                reason = f"'{blocks}' {shape} and its scales {scales.get_shape()} are not bytes of one matrix"
                raise HFFileDamaged(path=str(path), reason=reason)
            self._located[name] = path, PackedMatrices(handle, other, name)

    def _file_name(self, name: str) -> str:
        """Return the name in the files of the tensor that the whole model calls ``name``."""
        return name if name in self._located else _without_prefix(name)

    def _slice(self, name: str) -> Any:
        name = self._file_name(name)
        return self._located[name][1].get_slice(name)

    def _get(self, name: str) -> torch.Tensor:
        name = self._file_name(name)
        path, handle = self._located[name]
        try:
            tensor: torch.Tensor = handle.get_tensor(name)
        except SafetensorError as error:
            raise HFFileDamaged(path=str(path), reason=str(error)) from error
        return tensor


def _require_readable(path: Path) -> None:
    try:
        require_inside(path, path.parent)
        require_fetched(path)
    except OSError as error:
        raise HFFileDamaged(path=str(path), reason=error.strerror or str(error)) from error


def _without_prefix(name: str) -> str:
    return name.partition(".")[2]


class HFReader(CheckpointReader):
    """A :class:`~nxdt_core.protocols.format.CheckpointReader`: weights alone.

    Raises:
        HFFileMissing, HFFileDamaged: of its ``config.json``.
    """

    step = 0
    consumed_samples = 0

    def __init__(self, path: Path) -> None:
        self._path = path.absolute()
        self._config = read_json(self._path, CONFIG)
        self._sources: dict[str, Source] = {}

    def model_config(self) -> Mapping[str, Any]:
        """Return its ``config.json``, for the plugin that reads the architecture, and its tokenizer.

        Raises:
            ArchitectureUnread: no installed plugin does.
            HFFileDamaged: its values cannot be those of its weights.
        """
        try:
            architectures = architectures_of(self._config)
        except HFFileDamaged as error:
            error.path = str(self._path / CONFIG)
            raise
        registry = Kernel.start().registry
        if not registry.readers(architectures):  # a configuration would fall back to some model that does not read it
            records = (component.record for component in registry.all("model"))
            readable = {name for r in records if isinstance(r, ModelComponent) for name in r.hf_architectures}
            install, blocked = registry.reading_dists(architectures)
            raise ArchitectureUnread(
                path=str(self._path),
                architectures=list(architectures),
                available=sorted(readable),
                unusable=blocked,
                install=install,
            )
        reason = unusable(self._config, weights=weights_in(self._path) or (0, 0))
        if reason is not None:
            raise HFFileDamaged(path=str(self._path / CONFIG), reason=reason)
        named = name_of(self._path) or str(self._path)  # with the commit, for other machines
        keys: dict[str, Any] = {"model.model_config": named}
        for file, (library, name) in _TOKENIZERS.items():
            if (self._path / file).is_file():
                _require_readable(self._path / file)
                model = named if name == "." else str(self._path / name)
                return {**keys, "data.tokenizer.library": library, "data.tokenizer.model": model}
        return keys

    def listing(self, builder: ModelBuilder, *, weights_only: bool = False) -> Listing:
        """Return every parameter, from the headers of the files; such a directory has weights alone."""
        with HFWeights(self._path, fill_rows=self.fill_rows) as weights:
            self._sources = {source.name: source for source in weights.sources(builder)}
            dtypes = {name: weights.dtype_of(source) for name, source in self._sources.items()}
        return {
            ("model", name): ShardInfo(
                dtype=str(dtypes[name]).removeprefix("torch."),
                shape=source.shape,
                region=TensorSlice.whole(source.shape),
            )
            for name, source in self._sources.items()
        }

    def read(self, places: Sequence[TensorKey]) -> Iterator[torch.Tensor]:
        """Yield the parameters, one at a time out of mapped files."""
        with HFWeights(self._path) as weights:
            for _, name in places:
                yield weights.read(self._sources[name])
