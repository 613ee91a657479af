"""Whether the weights that are about to be committed are those that were committed before. Torch-free."""

from __future__ import annotations

import json

from nxdt_core.checkpoint.format.digests import digest
from nxdt_core.checkpoint.format.file_names import MASTER_WEIGHT, step_name
from nxdt_core.checkpoint.format.manifest import Manifest
from nxdt_core.errors.checkpoints import SameWeightsSaved

__all__ = ["check_weights_moved", "weights_fingerprint"]


def weights_fingerprint(manifest: Manifest) -> str:
    """Return a digest over the digests of the files of weights: of the same weights in the same layout it is the same.

    No byte of them is read again. Empty where there is no such file. Where weights were rounded, those that they were
    rounded from count, with what else is in their files: a small update changes no bit of a rounded one.
    """
    rounded = any(key.endswith(f"/{MASTER_WEIGHT}") for key in manifest.tensors.get("optim", {}))
    sections = ("model/", "optim/") if rounded else ("model/",)
    rows = sorted((name, entry.digests_digest) for name, entry in manifest.files.items() if name.startswith(sections))
    return digest(json.dumps(rows).encode()) if rows else ""


def check_weights_moved(before: Manifest | None, manifest: Manifest, *, uri: str) -> None:
    """Refuse to commit the same weights under two steps between which updates were applied.

    Copies that were not renewed look like this (NeMo-RL's issue 3312), and nothing else of a checkpoint shows it.

    Args:
        before: the newest committed checkpoint of the run.
        manifest: about to be committed.
        uri: of the store, for the message.

    Raises:
        SameWeightsSaved: they are the same.
    """
    if before is None:
        return
    updates, fingerprint = manifest.facts.updates - before.facts.updates, weights_fingerprint(manifest)
    if updates > 0 and fingerprint and fingerprint == weights_fingerprint(before):
        reason = (
            f"its weights are bitwise identical to those of {step_name(before.step)}, and {updates} update(s) with "
            f"a learning rate above zero happened between them"
        )
        raise SameWeightsSaved(where=f"{uri}/{step_name(manifest.step)}", reason=reason)
