"""A LoRA run's checkpoint, opened on one process: its section, its updates, and the weights below them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from nxdt_core import checkpoint
from nxdt_core.checkpoint import Manifest, TrustedKeys
from nxdt_core.config import ResolvedConfig
from nxdt_core.protocols.store import CheckpointStore
from nxdt_core.train import build
from nxdt_core.train.weights.base import BaseWeights, base_weights
from nxdt_core.train.weights.saved_config import SavedRun, saved_run
from nxdt_plugin_lora.adaptation import adapt
from nxdt_plugin_lora.config import LoraConfig
from nxdt_plugin_lora.errors import NoAdapterHere
from nxdt_plugin_lora.peft_names import base_of

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedLora:
    """One checkpoint."""

    storage: CheckpointStore
    manifest: Manifest
    run: SavedRun
    lora: LoraConfig
    trained: Mapping[str, tuple[int, ...]]
    """Shapes of all that trained, by name."""
    found_base: BaseWeights | None
    """Weights of the base; None where they were not needed."""

    @property
    def uri(self) -> str:
        """Address of the checkpoint."""
        return build.step_uri(self.storage, self.manifest.step)

    @property
    def base(self) -> BaseWeights:
        """The weights below the adapter."""
        assert self.found_base is not None
        return self.found_base

    @property
    def updated(self) -> Mapping[str, Mapping[str, str]]:
        """Return, by the name of a matrix, the parameters of its update by kind (``lora_A``, …)."""
        found: dict[str, dict[str, str]] = {}
        for name in self.trained:
            leaf = base_of(name)
            if leaf is not None:
                found.setdefault(leaf.base, {})[leaf.kind] = name
        return found

    def read(self, names: Sequence[str]) -> Iterator[torch.Tensor]:
        """Yield trained parameters in order, whole."""
        return checkpoint.iterate_model(self.storage, self.manifest, names)

    def check_base(self) -> None:
        """Check that the base weights are those that the adapter was trained on.

        Raises:
            AdapterOfAnotherBase: the base weights differ.
        """
        frozen = [name for name in self.base.specs if name not in self.trained and base_of(name) is None]
        self.base.check(frozen, self.manifest.facts.base, where=self.uri)


def open_saved(
    storage: CheckpointStore,
    step: int | None,
    *,
    base: str | None = None,
    needs_base: bool = True,
    config: ResolvedConfig | None = None,
    trusted: TrustedKeys | None = None,
) -> SavedLora:
    """Return one checkpoint of a run.

    Args:
        storage: the store that holds the run's checkpoints.
        step: step of the checkpoint; None selects the newest valid one.
        base: address of the frozen weights, if they are no longer where the run read them.
        needs_base: whether the frozen weights are to be read.
        config: decides in place of the configuration that the checkpoint keeps.
        trusted: keys, one of which must have signed the checkpoint and its base; None requires no signature.

    Raises:
        NoAdapterHere: the run trained without LoRA.
        CheckpointNotFound, SavedConfigUnusable: the checkpoint cannot be opened.
    """
    manifest = checkpoint.find_checkpoint(storage, step, warn=_log.warning, trusted=trusted)
    uri = build.step_uri(storage, manifest.step)
    saved = saved_run(manifest, where=uri, config=config, base=needs_base and base is None)
    run = saved.config
    chosen = run.components["adapter"]
    if chosen is None or not isinstance(chosen.config, LoraConfig) or not chosen.config.enable_lora:
        raise NoAdapterHere(where=uri)
    builder = build.model_builder(run)
    with torch.device("meta"):
        model = builder.build()
        adapt(model, builder.plan(), chosen.config)
    return SavedLora(
        storage=storage,
        manifest=manifest,
        run=saved,
        lora=chosen.config,
        trained={name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad},
        found_base=base_weights(run, storage, manifest, base=base, trusted=trusted) if needs_base else None,
    )
