"""Entry module of ``nxdt-plugin-migrate``: declares what it reads; everything else is imported when it is used."""

from __future__ import annotations

from nxdt_core.api import Component, MigrationComponent, hookimpl


@hookimpl
def nxdt_formats() -> list[Component]:
    """Declare checkpoints of neuronx-distributed."""
    return [
        Component(
            name="neuronx",
            target="nxdt_plugin_migrate.checkpoint.format:NeuronxFormat",
            summary="a checkpoint of NxD Training with model/dp_rank_00_tp_rank_00_pp_rank_00.pt",
        )
    ]


@hookimpl
def nxdt_migrations() -> list[MigrationComponent]:
    """Return the YAML files of three programs."""
    programs = "nxdt_plugin_migrate.programs"
    return [
        MigrationComponent(
            name="nxdt",
            target=f"{programs}:NxDTraining",
            program="NxD Training",
            shown_by=("model_source", "model_alignment_strategy", "aync_exec_max_inflight_requests"),
            summary="YAML files of NxD Training 1.6",
        ),
        MigrationComponent(
            name="nemo",
            target=f"{programs}:NeMo",
            program="NeMo 1.x",
            shown_by=("model.data", "model.mcore_gpt", "model.global_batch_size"),
            summary="megatron_gpt_config.yaml and its kind",
        ),
        MigrationComponent(
            name="nnm",
            target=f"{programs}:NeuronxNemoMegatron",
            program="neuronx-nemo-megatron",
            shown_by=("model.wrap_with_zero", "model.zero_use_master_weight"),
            summary="YAML files of NeMo with the keys that it adds",
        ),
    ]
