"""Why a checkpoint's weights do not fit: which sizes of the model its run had."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields

from nxdt_core.checkpoint import Manifest
from nxdt_core.config import ResolvedConfig
from nxdt_core.errors.models import WeightsDoNotFit

__all__ = ["misfit_explained"]


@contextmanager
def misfit_explained(config: ResolvedConfig, manifest: Manifest) -> Iterator[None]:
    """Name in a ``WeightsDoNotFit`` the keys of the model that differ between ``manifest`` and
    ``config``."""
    try:
        yield
    except WeightsDoNotFit as error:
        saved = _otherwise(config, manifest)
        raise WeightsDoNotFit(missing=error.missing, extra=error.extra, shapes=error.shapes, saved=saved) from error


def _otherwise(config: ResolvedConfig, manifest: Manifest) -> list[str]:
    saved = manifest.facts.config.get("model", {})
    shown, own = config.to_dict()["model"], config.to_values()["model"]
    if not isinstance(saved, Mapping):
        return []
    keys = ["name", *(item.name for item in fields(config.selected("model").config))]
    return [
        f"model.{key}={saved[key]}" for key in keys if key in saved and saved[key] not in (shown.get(key), own.get(key))
    ]
