"""``save_checkpoint`` and ``load_checkpoint``: NxD Core's tags over checkpoints of the core.

``PATH/TAG`` is a separate store with one step, so that every command of ``nxdt checkpoint`` reads it. A checkpoint
can be loaded in any layout.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Mapping
from typing import Any

from nxdt_core.checkpoint import CheckpointManager, Manifest, delete_step, latest, list_checkpoints, open_storage
from nxdt_core.kernel import Kernel
from nxdt_core.protocols.store import CheckpointStore
from nxdt_core.train import TrainSession
from nxdt_plugin_nxd_core.arguments import binds, refused
from nxdt_plugin_nxd_core.config import current_config
from nxdt_plugin_nxd_core.errors import CheckpointTagMissing, NotOfThisModel
from nxdt_plugin_nxd_core.model import NxDModel

_log = logging.getLogger(__name__)

_MANIFEST = re.compile(r"(?:(.+)/)?step-(\d+)/manifest\.json")


@binds
def save_checkpoint(
    path: str,
    tag: str = "",
    model: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    user_content: Any = None,
    num_kept_ckpts: int | None = None,
    async_save: bool = False,
) -> None:
    """Commit model, optimizer, scheduler and the caller's content under ``path/tag``. Collective.

    Args:
        path: a directory, or the address of a store such as ``s3://…``.
        tag: of this checkpoint; a checkpoint of the same tag is replaced once this one is complete.
        optimizer: what :func:`initialize_parallel_optimizer` returned; None saves weights alone.
        user_content: numbers, text, tensors, and lists and dictionaries of them.
        num_kept_ckpts: delete all but this number of the newest tags afterwards.
        async_save: return once the model may be changed; the next save, or the end of the process, waits.

    Raises:
        NotOfThisModel: a model or an optimizer of another kind.
        NxdtError: on all ranks, what stopped the save; the tag's older checkpoint is as it was.
    """
    parts = tag.split("/") if isinstance(tag, str) else [""]
    if tag and (any(part in ("", ".", "..") for part in parts) or re.fullmatch(r"step-\d+", parts[0])):
        raise refused("save_checkpoint", "tag", repr(tag))
    session = _session("save_checkpoint", model, optimizer)
    content = content_of(tag, optimizer, scheduler, user_content)
    storage = _store(path, tag, session.config.kernel)
    finalize_checkpoint()
    run = current_config() or model.nxd_config
    if run.saves is None or run.saves.session.engine is not session.engine:  # those of a run that has ended
        run.saves = _Saves(model.nxd_config.session, storage)
    run.saves.path, run.saves.tag, run.saves.num_kept, run.saves.storage = str(path), tag, num_kept_ckpts, storage
    session.save(run.saves, asynchronous=True, extra=content)
    if not async_save:
        finalize_checkpoint()


@binds
def load_checkpoint(
    path: str,
    tag: str | None = None,
    model: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    strict: bool = True,
) -> Any:
    """Load what :func:`save_checkpoint` saved in any layout, and return its ``user_content``. Collective.

    Args:
        tag: tag of the checkpoint; None takes the newest.
        optimizer: its state is replaced, and the options of its groups; None leaves both.
        strict: refuse a checkpoint that lacks parameters of the model or has others.

    Raises:
        CheckpointTagMissing: there is none of that tag, or none at all.
        WeightsDoNotFit: names or shapes differ.
    """
    session = _session("load_checkpoint", model, optimizer)
    finalize_checkpoint()
    ranks, kernel = session.engine.ranks, session.config.kernel
    tags = ranks.on_rank_zero(lambda: _tags(path, kernel))
    tag = next(iter(tags), None) if tag is None else tag
    storage = _store(path, tag, kernel) if tag is not None and tag in tags else None
    manifest = None if storage is None else latest(storage, warn=_log.warning, ranks=ranks)
    if storage is None or manifest is None:
        raise CheckpointTagMissing(path=path, tag=tag, tags=[other for other in tags if other != tag])
    content = session.load_checkpoint(storage, manifest, weights_only=optimizer is None, strict=strict)
    restore(content, optimizer, scheduler)
    return content.get("user_content")


def content_of(tag: str, optimizer: Any, scheduler: Any, user_content: Any) -> dict[str, Any]:
    """Return what a checkpoint of a caller's own loop holds besides tensors."""
    return {
        "tag": tag,
        "scheduler": None if scheduler is None else _plain(scheduler.state_dict()),
        "user_content": user_content,
        "groups": None if optimizer is None else _plain(optimizer.options()),
    }


def restore(content: Mapping[str, Any], optimizer: Any, scheduler: Any) -> None:
    """Put the groups' options and the scheduler's state of :func:`content_of` back."""
    if optimizer is not None and content.get("groups") is not None:
        for group, options in zip(optimizer.param_groups, content["groups"], strict=True):
            group.update(options)
    if scheduler is not None and content.get("scheduler") is not None:
        scheduler.load_state_dict(content["scheduler"])


@binds
def has_checkpoint(path: str) -> bool:
    """Return whether ``path`` has a complete checkpoint under any tag. Not collective."""
    return bool(_tags(path, None))


def finalize_checkpoint() -> None:
    """Wait for the save in flight, if there is one. Collective."""
    config = current_config()
    if config is not None and config.saves is not None:
        config.saves.wait()


class _Saves(CheckpointManager):
    """The saves of a run: one at a time, each into a separate store."""

    path: str
    tag: str
    num_kept: int | None

    def __init__(self, session: TrainSession, storage: CheckpointStore) -> None:
        super().__init__(storage, ranks=session.engine.ranks, refuse_same_weights=False, after_commit=self._prune)
        self.session = session

    def _prune(self, manifest: Manifest) -> None:
        """Delete the tag's older steps, and all tags but the newest. On rank 0, after a commit."""
        kernel = self.session.config.kernel
        old = _tags(self.path, kernel)[self.num_kept :] if self.num_kept is not None else []
        for tag in {self.tag, *old}:
            storage = _store(self.path, tag, kernel)
            for status in list_checkpoints(storage):
                if status.state == "committed" and (tag in old or status.step != manifest.step):
                    delete_step(storage, status.step)


def _tags(path: str, kernel: Kernel | None) -> list[str]:
    """Return the tags that have a manifest, the newest first."""
    newest: dict[str, tuple[float, int]] = {}
    for info in open_storage(path, kernel).list():
        match = _MANIFEST.fullmatch(info.key)
        if match is not None:
            tag, at = match[1] or "", (info.modified, int(match[2]))
            newest[tag] = max(at, newest.get(tag, at))
    return sorted(newest, key=lambda tag: newest[tag], reverse=True)


def _store(path: str, tag: str, kernel: Kernel | None) -> CheckpointStore:
    return open_storage(f"{str(path).rstrip('/')}/{tag}" if tag else str(path), kernel)


def _session(call: str, model: Any, optimizer: Any) -> TrainSession:
    """Return the run's session, without its optimizer where the caller leaves that out."""
    if not isinstance(model, NxDModel):
        raise NotOfThisModel(call=call, problem=f"model is {type(model).__name__}, and must be")
    session = model.nxd_config.session
    if optimizer is None and session.built_optimizer is not None:
        session = copy.copy(session)
        session.built_optimizer = None
    if optimizer not in (None, *model.nxd_config.optimizers):
        raise NotOfThisModel(call=call, problem=f"optimizer is {type(optimizer).__name__}, and must be one")
    return session


def _plain(value: Any) -> Any:
    """Return text, numbers and tensors; what else a scheduler keeps, such as bound methods, is left out."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items() if not callable(item)}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
