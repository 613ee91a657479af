"""Checkpoints that carry the Hugging Face form of their model: ``checkpoint.hf_every_n_saves``."""

from __future__ import annotations

from collections.abc import Mapping

from nxdt_core.checkpoint.format.digested_files import AttemptWriter
from nxdt_core.checkpoint.format.file_names import hf_name
from nxdt_core.checkpoint.format.manifest import FileEntry, Manifest
from nxdt_core.checkpoint.hf.key_map import exchange_of
from nxdt_core.checkpoint.hf.write import read_from, write_shards
from nxdt_core.checkpoint.os_errors import explained_os_errors
from nxdt_core.config import ResolvedConfig
from nxdt_core.protocols.parallel.ranks import RankAgreement
from nxdt_core.protocols.store import CheckpointStore
from nxdt_core.train import build
from nxdt_core.train.weights.export import plan_export
from nxdt_core.train.weights.saved_config import own_run

__all__ = ["HFForm"]


class HFForm:
    """Writes, into every ``every``-th save, a directory that transformers loads; ranks divide its files.

    Given to a :class:`~nxdt_core.checkpoint.CheckpointManager` as ``add_files``. The tensors are read back from the
    save's own files, verified: no rank holds more than one file of weights, in any layout.

    Raises:
        HFExchangeUnsupported: the run's model has no counterpart at Hugging Face.
    """

    def __init__(self, config: ResolvedConfig, storage: CheckpointStore, ranks: RankAgreement, *, every: int) -> None:
        exchange_of(build.model_builder(config))
        self._run = own_run(config)
        self._storage = storage
        self._rank, self._world_size = ranks.rank, ranks.world_size
        self._every = every
        self._saves = 0
        """The same on all ranks: each of them is asked once a save."""

    def __call__(self, manifest: Manifest) -> Mapping[str, FileEntry]:
        """Write this rank's files next to those of the save that ``manifest`` is about to commit."""
        self._saves += 1
        if self._saves % self._every:
            return {}
        plan, _ = plan_export(self._run, manifest)
        writer = AttemptWriter(self._storage, manifest.prefix, manifest.digests)
        with explained_os_errors(f"{self._storage.uri}/{manifest.prefix}"):
            mine = plan.shards[self._rank :: self._world_size]
            write_shards(lambda name: writer.file(hf_name(name)), mine, read_from(self._storage, manifest))
            for name, content in plan.texts.items() if self._rank == 0 else ():
                with writer.file(hf_name(name)) as stream:
                    stream.write(content)
        return writer.entries
