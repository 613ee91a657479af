"""The reader of the format ``hf``: a Hugging Face directory, whose weights go through a builder's key map."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from nxdt_core.api import ModelComponent
from nxdt_core.checkpoint.hf.json_files import CONFIG, read_json
from nxdt_core.checkpoint.hf.key_map import Source
from nxdt_core.checkpoint.hf.weights import HFWeights
from nxdt_core.config.huggingface.bounds import oversized, weights_in
from nxdt_core.config.huggingface.values import architectures_of
from nxdt_core.errors.exchange import ArchitectureUnread
from nxdt_core.errors.models import HFFileDamaged
from nxdt_core.kernel import Kernel
from nxdt_core.protocols.model import ModelBuilder
from nxdt_core.protocols.piece import Box, Listing, ShardInfo, TensorKey

__all__ = ["HFReader"]

_TOKENIZERS = {"tokenizer.json": ("huggingface", "."), "tokenizer.model": ("sentencepiece", "tokenizer.model")}
"""File that shows which tokenizer a directory has → our component, and what its key ``model`` names."""


class HFReader:
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
            HFFileDamaged: its sizes are not those of its weights.
        """
        self._check_architecture()
        tensors, size_bytes = weights_in(self._path) or (0, 0)
        reason = oversized(self._config, tensors=tensors, size_bytes=size_bytes)
        if reason is not None:
            raise HFFileDamaged(path=str(self._path / CONFIG), reason=reason)
        keys: dict[str, Any] = {"model.model_config": str(self._path)}
        for file, (library, name) in _TOKENIZERS.items():
            if (self._path / file).is_file():
                return {**keys, "data.tokenizer.library": library, "data.tokenizer.model": str(self._path / name)}
        return keys

    def listing(self, builder: ModelBuilder, *, weights_only: bool = False) -> Listing:
        """Return every parameter, from the headers of the files; such a directory has weights alone."""
        with HFWeights(self._path) as weights:
            self._sources = {source.name: source for source in weights.sources(builder)}
            dtypes = {name: weights.dtype_of(source) for name, source in self._sources.items()}
        return {
            ("model", name): ShardInfo(
                dtype=str(dtypes[name]).removeprefix("torch."), shape=source.shape, box=Box.whole(source.shape)
            )
            for name, source in self._sources.items()
        }

    def read(self, places: Sequence[TensorKey]) -> Iterator[torch.Tensor]:
        """Yield the parameters, one at a time out of mapped files."""
        with HFWeights(self._path) as weights:
            for _, name in places:
                yield weights.read(self._sources[name])

    def _check_architecture(self) -> None:
        """Without a plugin that reads it, a configuration would fall back to some model that does not."""
        try:
            named = architectures_of(self._config)
        except HFFileDamaged as error:
            error.path = str(self._path / CONFIG)
            raise
        kernel = Kernel.start()
        if not kernel.registry.readers(named):
            records = (component.record for component in kernel.registry.all("model"))
            readable = {name for r in records if isinstance(r, ModelComponent) for name in r.hf_architectures}
            install, unusable = kernel.registry.reading_dists(named)
            raise ArchitectureUnread(
                path=str(self._path),
                architectures=list(named),
                available=sorted(readable),
                unusable=unusable,
                install=install,
            )
