"""``save_checkpoint`` and ``load_checkpoint``: NxD Core's tags over checkpoints of the core.

``PATH/TAG`` is a separate store with one step, so that every command of ``nxdt checkpoint`` reads it. A checkpoint
can be loaded in any layout.
"""

from __future__ import annotations

import copy
import logging
import os
import re
from collections.abc import Mapping
from typing import Any

from nxdt_core import checkpoint
from nxdt_core.checkpoint import CheckpointManager, Manifest, delete_step, open_storage
from nxdt_core.checkpoint.collective import on_first_rank
from nxdt_core.train.session import TrainSession
from nxdt_plugin_nxd_core.arguments import binds, expect, refused
from nxdt_plugin_nxd_core.config import NxDConfig, current_config
from nxdt_plugin_nxd_core.errors import CheckpointTagMissing, NotOfThisModel
from nxdt_plugin_nxd_core.model import NxDModel
from nxdt_plugin_nxd_core.optimizer import NxDOptimizer

__all__ = ["content_of", "finalize_checkpoint", "has_checkpoint", "load_checkpoint", "restore", "save_checkpoint"]


_log = logging.getLogger(__name__)

_MANIFEST = re.compile(r"(?:(.+)/)?step-(\d+)/manifest\.json")
_WORKERS = range(1, 33)


@binds(
    num_workers="each rank writes its share at once",
    use_xser="tensors are written one by one always",
    zero1_optimizer="each shard has its place in the whole",
    use_zero1_dcp="each shard has its place in the whole",
    avoid_saving_lower_precision_weights="each weight is saved once",
)
def save_checkpoint(
    path: str,
    tag: str = "",
    model: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    user_content: Any = None,
    num_workers: int = 8,
    use_xser: bool = False,
    num_kept_ckpts: int | None = None,
    async_save: bool = False,
    zero1_optimizer: bool = False,
    use_zero1_dcp: bool = False,
    avoid_saving_lower_precision_weights: bool = False,
    nxd_config: NxDConfig | None = None,
) -> None:
    """Commit model, optimizer, scheduler and the caller's content under ``path/tag``. Collective.

    Args:
        path: a directory, or the address of a store such as ``s3://…``.
        tag: of this checkpoint; a checkpoint of the same tag is replaced once this one is complete.
        model: what :func:`initialize_parallel_model` returned.
        optimizer: what :func:`initialize_parallel_optimizer` returned; None saves weights alone.
        scheduler: its ``state_dict()`` is saved.
        user_content: numbers, text, tensors, and lists and dictionaries of them.
        num_kept_ckpts: delete all but this number of the newest tags afterwards.
        async_save: return once the model may be changed; the next save, or the end of the process, waits.
        num_workers, use_xser, zero1_optimizer, use_zero1_dcp, avoid_saving_lower_precision_weights: no effect.
        nxd_config: the configuration that ``model`` was made with.

    Raises:
        NotOfThisModel: a model or an optimizer of another kind.
        NxdtError: on all ranks, what stopped the save; the tag's older checkpoint is as it was.
    """
    call = "save_checkpoint"
    _check_arguments(call, path, scheduler, num_workers)
    kept = num_kept_ckpts is None or type(num_kept_ckpts) is int
    expect(call, "num_kept_ckpts", num_kept_ckpts, "an integer, or None", when=kept)
    if num_kept_ckpts is not None and num_kept_ckpts < 1:
        advice = "Pass a number from 1, or None."
        raise refused(call, "num_kept_ckpts", repr(num_kept_ckpts), "keeps nothing", advice)
    _check_tag(call, tag)
    config = _config(call, model, optimizer)
    session = _session(config, optimizer)
    content = content_of(tag, optimizer, scheduler, user_content)
    where = _address(path, tag)
    storage = open_storage(where, session.config.kernel)
    finalize_checkpoint()

    saves = _saves_of(config)
    saves.path, saves.tag, saves.kept = str(path), tag, num_kept_ckpts
    saves.manager.storage = storage
    session.begin_save(saves.manager, extra=content)
    if not async_save:
        finalize_checkpoint()


@binds(num_workers="each rank reads its share at once", use_zero1_dcp="each shard has its place in the whole")
def load_checkpoint(
    path: str,
    tag: str | None = None,
    model: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    num_workers: int = 8,
    strict: bool = True,
    use_zero1_dcp: bool = False,
) -> Any:
    """Load what :func:`save_checkpoint` saved in any layout, and return its ``user_content``. Collective.

    Args:
        path: as of :func:`save_checkpoint`.
        tag: tag of the checkpoint; None takes the newest.
        model: its weights are replaced.
        optimizer: its state is replaced, and the options of its groups; None leaves both.
        scheduler: gets the state that was saved.
        num_workers, use_zero1_dcp: no effect.
        strict: refuse a checkpoint that lacks parameters of the model or has others.

    Raises:
        CheckpointTagMissing: there is none of that tag, or none at all.
        WeightsDoNotFit: names or shapes differ.
    """
    call = "load_checkpoint"
    _check_arguments(call, path, scheduler, num_workers)
    config = _config(call, model, optimizer)
    session = _session(config, optimizer)
    finalize_checkpoint()
    ranks, kernel = session.engine.ranks, session.config.kernel
    tags = on_first_rank(ranks, lambda: _tags(path, session), where=path)
    chosen = tag if tag is not None else next(iter(tags), None)
    if chosen is None or chosen not in tags:
        raise CheckpointTagMissing(path=path, tag=tag, tags=tags)
    storage = open_storage(_address(path, chosen), kernel)
    manifest = checkpoint.latest(storage, warn=_log.warning, ranks=ranks)
    if manifest is None:
        raise CheckpointTagMissing(path=path, tag=chosen, tags=[each for each in tags if each != chosen])
    content = session.load_checkpoint(storage, manifest, weights_only=optimizer is None, strict=strict)
    restore(content, optimizer, scheduler)
    return content.get("user_content")


def content_of(tag: str, optimizer: Any, scheduler: Any, user_content: Any) -> dict[str, Any]:
    """Return what a checkpoint of a caller's own loop holds besides tensors."""
    return {
        "tag": tag,
        "scheduler": None if scheduler is None else _plain(scheduler.state_dict()),
        "user_content": user_content,
        "groups": None if optimizer is None else [_options(group) for group in optimizer.param_groups],
    }


def restore(content: Mapping[str, Any], optimizer: Any, scheduler: Any) -> None:
    """Put the groups' options and the scheduler's state of :func:`content_of` back."""
    if optimizer is not None and content.get("groups") is not None:
        for group, options in zip(optimizer.param_groups, content["groups"], strict=True):
            group.update(options)
    if scheduler is not None and content.get("scheduler") is not None:
        scheduler.load_state_dict(content["scheduler"])


def has_checkpoint(path: str) -> bool:
    """Return whether ``path`` has a complete checkpoint under any tag. Not collective."""
    expect("has_checkpoint", "path", path, "a path", when=isinstance(path, str | os.PathLike))
    return bool(_tags(path, None))


def finalize_checkpoint() -> None:
    """Wait for the save in flight, if there is one. Collective."""
    config = current_config()
    if config is not None and config.saves is not None:
        config.saves.manager.wait()


class _Saves:
    """The saves of a run: one at a time, each into a separate store."""

    def __init__(self, config: NxDConfig) -> None:
        self.config = config
        self.path, self.tag, self.kept = "", "", None
        self.manager = CheckpointManager(
            open_storage(".", config.session.config.kernel),
            ranks=config.engine.ranks,
            refuse_same_weights=False,
            after_commit=self._after_commit,
        )

    path: str
    tag: str
    kept: int | None

    def _after_commit(self, manifest: Manifest) -> None:
        _prune(self.path, self.tag, self.config.session, manifest, self.kept)


def _saves_of(config: NxDConfig) -> _Saves:
    """The saves of ``config``, in the place of those of another run in this process group, which have ended."""
    run = current_config() or config
    if run.saves is None or run.saves.config is not config:
        run.saves = _Saves(config)
    saves: _Saves = run.saves
    return saves


def _prune(path: str, tag: str, session: TrainSession, manifest: Manifest, kept: int | None) -> None:
    """Delete the tag's older steps, and all tags but the newest ``kept``. On rank 0, after a commit."""
    storage = open_storage(_address(path, tag), session.config.kernel)
    for status in checkpoint.list_checkpoints(storage):
        if status.step != manifest.step and status.state == "committed":
            delete_step(storage, status.step)
    for old in _tags(path, session)[kept:] if kept is not None else ():
        storage = open_storage(_address(path, old), session.config.kernel)
        for status in checkpoint.list_checkpoints(storage):
            if status.state == "committed":
                delete_step(storage, status.step)


def _tags(path: str, session: TrainSession | None) -> list[str]:
    """Tags that have a manifest, the newest first."""
    storage = open_storage(path, None if session is None else session.config.kernel)
    newest: dict[str, tuple[float, int]] = {}
    for info in storage.list():
        match = _MANIFEST.fullmatch(info.key)
        if match is not None:
            tag, at = match[1] or "", (info.modified, int(match[2]))
            newest[tag] = max(at, newest.get(tag, at))
    return sorted(newest, key=lambda tag: newest[tag], reverse=True)


def _address(path: str, tag: str) -> str:
    return f"{str(path).rstrip('/')}/{tag}" if tag else str(path)


def _config(call: str, model: Any, optimizer: Any) -> NxDConfig:
    if not isinstance(model, NxDModel):
        raise NotOfThisModel(call=call, problem=f"model is {type(model).__name__}, and must be")
    if optimizer is not None and (
        not isinstance(optimizer, NxDOptimizer) or optimizer.nxd_config is not model.nxd_config
    ):
        raise NotOfThisModel(call=call, problem=f"optimizer is {type(optimizer).__name__}, and must be one")
    return model.nxd_config


def _session(config: NxDConfig, optimizer: Any) -> TrainSession:
    """The run's session, without its optimizer where the caller leaves that out."""
    if optimizer is not None or not hasattr(config.session, "optimizer"):
        return config.session
    session = copy.copy(config.session)
    del session.optimizer
    return session


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _plain(value) for key, value in group.items() if key not in ("params", "names", "shards")}


def _plain(value: Any) -> Any:
    """Text, numbers and tensors; what else a scheduler keeps, such as bound methods, is left out."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items() if not callable(each)}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value


def _check_tag(call: str, tag: str) -> None:
    if tag and (not isinstance(tag, str) or any(part in ("", ".", "..") for part in tag.split("/"))):
        raise refused(call, "tag", repr(tag), "is not a relative path", "Pass text such as 'step_100'.")
    if re.match(r"step-\d+(/|$)", str(tag)):
        advice = "Use another form, such as 'step_100': steps within a tag are named step-…"
        raise refused(call, "tag", repr(tag), "is the name of a step of a store", advice)


def _check_arguments(call: str, path: Any, scheduler: Any, number: int) -> None:
    expect(call, "path", path, "a path", when=isinstance(path, str | os.PathLike) and bool(str(path)))
    stateful = scheduler is None or (hasattr(scheduler, "state_dict") and hasattr(scheduler, "load_state_dict"))
    expect(call, "scheduler", scheduler, "a scheduler with state_dict and load_state_dict", when=stateful)
    if number not in _WORKERS:
        raise refused(call, "num_workers", repr(number), "is not from 1 to 32", "Leave it out: it has no effect here.")
