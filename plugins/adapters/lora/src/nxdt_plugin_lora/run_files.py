"""Files that a LoRA run writes next to its checkpoints, where its section requests them."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from nxdt_core import checkpoint
from nxdt_core.checkpoint.collective import on_first_rank
from nxdt_core.config import ResolvedConfig
from nxdt_core.errors.training import CannotWriteRunDirectory
from nxdt_core.protocols.ranks import RankAgreement
from nxdt_core.regular_files import make_directory, replace_text
from nxdt_core.train import build
from nxdt_plugin_lora.config import LoraConfig
from nxdt_plugin_lora.merging import merge_lora
from nxdt_plugin_lora.peft.config import peft_config
from nxdt_plugin_lora.peft.files import CONFIG

__all__ = ["MERGED", "merge_last", "write_options"]

MERGED = "-merged"
"""Behind the address of a run's checkpoints: where the merged model is committed."""
_DIRECTORY = "lora_adapter"

_log = logging.getLogger(__name__)


def write_options(lora: LoraConfig, run_dir: Path) -> None:
    """Write ``lora_adapter/adapter_config.json``: the section in peft's words, targets as they are named here.

    Raises:
        CannotWriteRunDirectory: it cannot be written.
    """
    content = peft_config(
        lora, base=None, targets=lora.target_modules, whole=lora.modules_to_save, modules=(), transposed=False
    )
    try:
        replace_text(make_directory(run_dir / _DIRECTORY) / CONFIG, json.dumps(content, indent=2) + "\n")
    except OSError as error:
        reason = f"{_DIRECTORY}: {error.strerror or error}"
        raise CannotWriteRunDirectory(path=str(run_dir), reason=reason) from error


def merge_last(uri: str, config: ResolvedConfig, ranks: RankAgreement) -> None:
    """Merge the checkpoint at ``uri`` into the store next to its own, unless it was already; an older merged step
    goes. Both are reached as ``checkpoint.storage`` of ``config`` says. Collective."""
    storage, step = build.locate(config, uri)
    assert step is not None
    place, _ = build.locate(config, f"{storage.uri}{MERGED}")

    def is_merged() -> bool:
        merged = {status.step for status in checkpoint.list_checkpoints(place) if status.state == "committed"}
        made = checkpoint.read_manifest(storage, step).created
        return step in merged and checkpoint.read_manifest(place, step).created > made

    if on_first_rank(ranks, is_merged, where=place.uri):
        return
    merged = merge_lora(
        storage,
        step,
        place,
        ranks=ranks,
        keep_others=True,
        signer=build.signer(config),
        config=config,
        trusted=build.trusted_keys(config),
    )
    if ranks.rank == 0:
        _log.warning("merged model: %s", merged.target)

    def delete_older() -> list[int]:
        return checkpoint.prune(place, 1, deep=False, passed_over=lambda other: other > step)

    on_first_rank(ranks, delete_older, where=place.uri)
