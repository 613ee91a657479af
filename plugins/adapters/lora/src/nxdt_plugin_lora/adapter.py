"""The adapter ``lora``: what a run does with it, the initial values that depend on the base, and a start from a saved
adapter (``load_lora_from_ckpt``), which a run here or peft wrote."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nxdt_core import checkpoint
from nxdt_core.checkpoint.collective import on_all_ranks
from nxdt_core.checkpoint.format.file_names import step_name
from nxdt_core.checkpoint.signing import refuse_foreign
from nxdt_core.config import ResolvedConfig
from nxdt_core.distributed.placement import is_dtensor, local_shard_of
from nxdt_core.errors.checkpoints import AdapterOfAnotherBase
from nxdt_core.errors.models import WeightsDoNotFit
from nxdt_core.models.updates import Update
from nxdt_core.protocols.adapter import Adapter, SavedAdapter
from nxdt_core.protocols.parallel_model import ParallelModel
from nxdt_core.protocols.plan import InitRule, ParallelPlan
from nxdt_core.protocols.ranks import RankAgreement
from nxdt_core.protocols.tensor_shards import TensorSlice
from nxdt_core.train import build
from nxdt_core.train.weights.loading import base_digest, without_base
from nxdt_core.train.weights.saved_config import saved_adapter
from nxdt_plugin_lora.adaptation import EmbeddingUpdate, ExpertsUpdate, LowRankUpdate, adapt, tables_of
from nxdt_plugin_lora.config import LoraConfig
from nxdt_plugin_lora.errors import AdapterDiffers, BaseIsNoReference, LayerNotAdaptable
from nxdt_plugin_lora.peft_files import differences, is_peft, peft_tensors, read_config, read_peft, section_for, unequal
from nxdt_plugin_lora.saved_run import merge_last, write_options

_log = logging.getLogger(__name__)

_COMPUTED = ("lora_rank", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern")
"""Keys that decide on what a saved update computes."""


class LoraAdapter(Adapter):
    """An :class:`~nxdt_core.protocols.adapter.Adapter`, which opens directories of peft."""

    def __init__(self, config: LoraConfig) -> None:
        self.config = config
        self._rules: Sequence[InitRule] = ()

    def apply(self, module: nn.Module, plan: ParallelPlan) -> ParallelPlan:
        """Freeze ``module`` and add updates, in place.

        Raises:
            TargetNotFound: a name in the configuration means nothing.
            TargetSavedWhole: a target trains whole already.
            LayerNotAdaptable: an option does not fit a layer.
        """
        if not self.config.enable_lora:
            return plan
        plan, self._rules, targets = adapt(module, plan, self.config)
        if self.config.lora_verbose:
            _log.warning("LoRA of rank %d on %d layers: %s", self.config.lora_rank, len(targets), ", ".join(targets))
        return plan

    @staticmethod
    def saved_at(path: Path) -> SavedAdapter | None:
        """Return the adapter that peft wrote into ``path``."""
        if not is_peft(path):
            return None
        return SavedAdapter(
            section=lambda builder: section_for(path, builder),
            base=read_config(path).get("base_model_name_or_path"),
        )

    @property
    def saves_base(self) -> bool:
        """``save_lora_base``."""
        return self.config.save_lora_base or not self.config.enable_lora

    def begin(self, model: ParallelModel, config: ResolvedConfig, ranks: RankAgreement) -> None:
        """Set what depends on the base's weights (DoRA's norms, PiSSA's start), and load the adapter to start from.

        Raises:
            BaseIsNoReference: that adapter changes the base, which the objective takes for the model of the beginning.
        """
        lora = self.config
        if not lora.save_lora_config_adapter:
            ranks.on_rank_zero(lambda: write_options(lora, config.run_dir))
        if not lora.enable_lora:
            return
        if (lora.use_dora or lora.init_lora_weights == "pissa") and not changes_base(model, ranks):
            set_initial_values(model, ranks)  # else they came with the updates
        if lora.load_lora_from_ckpt:
            assert lora.lora_save_dir is not None
            directory = Path(lora.lora_save_dir, "" if lora.lora_load_tag is None else str(lora.lora_load_tag))
            if is_peft(directory):
                refuse_foreign(build.trusted_keys(config), directory)
                _load_peft(directory, lora, model, config, ranks)
            else:
                _load_checkpoint(lora, model, config, ranks)
        if build.objective(config).traits.reference == "step" and changes_base(model, ranks):
            raise BaseIsNoReference(objective=config.run.objective.name)

    def check_resume(self, saved: Mapping[str, Any], where: str) -> None:
        """Refuse other scales and forms of the updates, as the protocol says."""
        if self.config.enable_lora and saved.get("name") == "lora" and saved.get("enable_lora"):
            _check_options(self.config, saved, where)

    def finish(self, checkpoint: str | None, config: ResolvedConfig, ranks: RankAgreement) -> None:
        """Merge the last checkpoint, where ``merge_lora`` asks for it."""
        if not self.config.merge_lora:
            return
        if checkpoint is None:
            _log.warning("merge_lora: the run has saved no checkpoint, so nothing is merged")
            return
        merge_last(checkpoint, config, ranks)

    def init_rules(self) -> Sequence[InitRule]:
        """Return rules for the parameters that :meth:`apply` has added: an update starts at zero. What depends on the
        base's weights is set once those are there."""
        return self._rules


def changes_base(model: ParallelModel, ranks: RankAgreement) -> bool:
    """Return whether an update of ``model`` has left its start. Collective."""
    parameters = {name: local_shard_of(parameter).tensor for name, parameter in model.named_parameters()}
    names = {
        f"{path}.{part.zero_initialised}"
        for module in model.local_modules()
        for path, part in module.named_modules()
        if isinstance(part, (LowRankUpdate, EmbeddingUpdate, ExpertsUpdate))
    }
    changed = (
        not torch.equal(parameters[name].to(start.dtype), start)
        if (start := parameters.get(f"{name}0")) is not None
        else bool(parameters[name].any())
        for name in names & parameters.keys()
    )
    return ranks.any_rank(any(changed))


@torch.no_grad()
def set_initial_values(model: ParallelModel, ranks: RankAgreement) -> None:
    """Set each magnitude of DoRA (arXiv:2402.09353) to the norm of its output feature's weights, and each update that
    starts as PiSSA (arXiv:2404.02948) to the largest singular values and vectors, which its residual lacks.

    Collective: each rank gathers every weight in full, one at a time. One rank computes the singular values of a weight
    for all that have a part of it, since others could choose other signs.

    Raises:
        LayerNotAdaptable: the engine holds a part of a weight in a form that is not gathered here.
    """
    parameters, state = dict(model.named_parameters()), model.state_dict()
    updates = {
        path: (part, module.get_parameter(f"{path.removesuffix('.update')}.weight"))
        for module in model.local_modules()
        for path, part in module.named_modules()
        if isinstance(part, Update) and (hasattr(part, "lora_magnitude") or hasattr(part, "lora_A0"))
    }
    computed: dict[str, torch.Tensor] = {}
    paths_of_ranks = ranks.all_gather_object([*updates])
    for number, (path, (update, weight)) in enumerate(updates.items()):
        whole = weight.full_tensor() if is_dtensor(weight) else weight
        saved = state.get(f"{path.removesuffix('.update')}.weight")
        if saved is not None and local_shard_of(saved).shape != tuple(whole.shape):
            option = "use_dora" if hasattr(update, "lora_magnitude") else "init_lora_weights"
            raise LayerNotAdaptable(
                path=path, layer="split by this engine", option=option, fits="layers of whole weights"
            )
        wide = whole.to(torch.promote_types(whole.dtype, torch.float32))
        if hasattr(update, "lora_magnitude"):
            norms = torch.linalg.vector_norm(wide, dim=update.inputs)
            shard = local_shard_of(parameters[f"{path}.lora_magnitude"])
            shard.tensor.copy_(norms[shard.region.within(local_shard_of(norms).region)])
        holders = [rank for rank, paths in enumerate(paths_of_ranks) if path in paths]
        if isinstance(update, LowRankUpdate) and update.residual and ranks.rank == holders[number % len(holders)]:
            rank = parameters[f"{path}.lora_A"].shape[0]
            left, values, right = torch.linalg.svd(wide, full_matrices=False)
            root = (values[:rank] / update.scaling).sqrt()
            computed[f"{path}.lora_A"] = (root.unsqueeze(1) * right[:rank]).cpu()
            computed[f"{path}.lora_B"] = (left[:, :rank] * root).cpu()
    for name, start in (item for of_rank in ranks.all_gather_object(computed) for item in of_rank.items()):
        for parameter in (parameters[key] for key in (name, f"{name}0") if key in parameters):
            shard = local_shard_of(parameter)
            shard.tensor.copy_(start[shard.region.within(TensorSlice.whole(shard.shape))])


def _check_options(lora: LoraConfig, saved: Mapping[str, Any], where: str) -> None:
    """Check that weights of a run with the section ``saved``, which may be of an older version, compute the same here.

    Raises:
        AdapterDiffers: they do not.
    """
    different = [*unequal(_COMPUTED, {"rank_pattern": {}, "alpha_pattern": {}, **saved}, lora)]
    if different:
        raise AdapterDiffers(where=where, differences=different)


def _load_checkpoint(lora: LoraConfig, model: ParallelModel, config: ResolvedConfig, ranks: RankAgreement) -> None:
    """Fill what trains from a checkpoint of a run. Collective: it succeeds on all ranks or fails on all.

    Raises:
        AdapterDiffers: it was trained with other options.
        AdapterOfAnotherBase: it was trained over other weights.
        WeightsDoNotFit: it has updates of other layers.
    """
    uri = str(lora.lora_save_dir)
    if lora.lora_load_tag is not None:
        tag = str(lora.lora_load_tag)
        uri = f"{uri.rstrip('/')}/{step_name(int(tag)) if tag.isdigit() else tag}"
    storage, step = build.locate(config, uri)
    trusted = build.trusted_keys(config)
    manifest = checkpoint.find_checkpoint(storage, step, warn=lambda _: None, ranks=ranks, trusted=trusted)
    where = build.step_uri(storage, manifest.step)
    _check_options(lora, saved_adapter(manifest, config), where)
    if manifest.facts.base and manifest.facts.base != base_digest(model, ranks):
        raise AdapterOfAnotherBase(where=where, base="this run")
    weights = without_base(model, model.state_dict())
    missing, _ = checkpoint.load_model_into(
        storage, manifest, weights, ranks=ranks, replicas=model.replicas, strict=manifest.facts.without_base
    )
    if missing:
        raise WeightsDoNotFit(missing=missing, extra=[], shapes=[])
    model.load_state_dict(weights, strict=False)


def _load_peft(
    directory: Path, lora: LoraConfig, model: ParallelModel, config: ResolvedConfig, ranks: RankAgreement
) -> None:
    """Fill what trains from a directory that peft wrote, as :func:`_load_checkpoint` does."""
    digest, trained = base_digest(model, ranks), {name for name, p in model.named_parameters() if p.requires_grad}
    weights = {name: weight for name, weight in model.state_dict().items() if name in trained}
    shapes_here = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    shapes = {name: shape for of_rank in ranks.all_gather_object(shapes_here) for name, shape in of_rank.items()}

    def fill() -> None:
        builder = build.model_builder(config)
        different = [*differences(lora, section_for(directory, builder, builds=False))]
        if different:
            raise AdapterDiffers(where=str(directory), differences=different)
        values, base = read_peft(directory, peft_tensors(builder, shapes, tables_of(builder)), shapes)
        if base and base != digest:
            raise AdapterOfAnotherBase(where=str(directory), base="this run")
        with torch.no_grad():
            for name, tensor in weights.items():
                shard = local_shard_of(tensor, name)
                shard.tensor.copy_(values[name][shard.region.within(TensorSlice.whole(shard.shape))])

    on_all_ranks(ranks, fill, where=str(directory))
    model.load_state_dict(weights, strict=False)
