"""Where a run begins: afresh, from the newest good checkpoint, or from one that the configuration names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from nxdt_core import checkpoint
from nxdt_core.checkpoint import Manifest
from nxdt_core.checkpoint.foreign import recognise
from nxdt_core.config import ResolvedConfig
from nxdt_core.errors import ForeignHasWeightsOnly, NoCheckpointToResume, RunAlreadyHasCheckpoints
from nxdt_core.protocols.checkpoint_storage import CheckpointStorage
from nxdt_core.protocols.ranks import RankAgreement
from nxdt_core.training import assemble

__all__ = ["ForeignStart", "Start", "agree_on_start", "decide_start"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The checkpoint that a run begins with."""

    storage: CheckpointStorage
    manifest: Manifest
    weights_only: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignStart:
    """Weights of another program that a run begins with."""

    path: Path


def agree_on_start(
    config: ResolvedConfig, own: CheckpointStorage, say: Callable[[str], None], ranks: RankAgreement
) -> Start | ForeignStart | None:
    """:func:`decide_start` on rank 0, for all: what one rank finds damaged or missing, no other may begin with.

    Collective. Raises on every rank what ``decide_start`` raises.
    """

    def decide() -> tuple[str, Manifest, bool] | ForeignStart | None:
        start = decide_start(config, own, say)
        return (start.storage.uri, start.manifest, start.weights_only) if isinstance(start, Start) else start

    decided = ranks.on_rank_zero(decide)
    if not isinstance(decided, tuple):
        return decided
    uri, manifest, weights_only = decided
    return Start(storage=assemble.locate(config, uri)[0], manifest=manifest, weights_only=weights_only)


def decide_start(
    config: ResolvedConfig, own: CheckpointStorage, say: Callable[[str], None]
) -> Start | ForeignStart | None:
    """Decide what to load; None starts afresh.

    Args:
        config: its section ``checkpoint`` says what is wanted.
        own: the run's store.
        say: prints a line about what is skipped.

    Raises:
        RunAlreadyHasCheckpoints: a new run would mix with an older one's checkpoints.
        NoCheckpointToResume: told to resume, and there is nothing good to resume from.
        ForeignHasWeightsOnly: told to go on from a checkpoint of another program.
    """
    wanted = config.run.checkpoint
    if wanted.resume_if_exists:
        newest = checkpoint.latest(own, warn=say)
        if newest is not None:
            return Start(storage=own, manifest=newest, weights_only=False)
    else:
        committed = [entry.step for entry in checkpoint.list_checkpoints(own) if entry.state == "committed"]
        if committed and wanted.enabled:
            raise RunAlreadyHasCheckpoints(uri=own.uri, step=max(committed))
    if wanted.resume_from is not None:
        return _named(config, wanted.resume_from, wanted.weight_init_only, say)
    if wanted.resume_if_exists and not wanted.resume_ignore_no_checkpoint:
        raise NoCheckpointToResume(uri=own.uri)
    return None


def _named(config: ResolvedConfig, uri: str, weights_only: bool, say: Callable[[str], None]) -> Start | ForeignStart:
    format = recognise(Path(uri))
    if format is not None:
        if not weights_only:
            raise ForeignHasWeightsOnly(path=uri, format=format)
        return ForeignStart(path=Path(uri))
    storage, step = assemble.locate(config, uri)
    manifest = checkpoint.find_checkpoint(storage, step, warn=say)
    return Start(storage=storage, manifest=manifest, weights_only=weights_only)
