"""Entry module of ``nxdt-plugin-preference``: declares the components; each is imported when a run asks for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from nxdt_core.api import Component, ConfigFinding, hookimpl

if TYPE_CHECKING:
    from nxdt_core.kernel.hookspecs import ConfigDefaultsContext, ValidateConfigContext


@hookimpl
def nxdt_objectives() -> list[Component]:
    """Declare the losses."""
    summaries = {
        "dpo": "direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290), IPO, cDPO, robust DPO",
        "cpo": "contrastive preference optimisation (Xu et al. 2024, arXiv:2401.08417), SimPO",
        "kto": "Kahneman-Tversky optimisation of unpaired answers (Ethayarajh et al. 2024, arXiv:2402.01306)",
        "orpo": "odds-ratio preference optimisation (Hong et al. 2024, arXiv:2403.07691)",
        "reward": "reward model: one score per answer (Ouyang et al. 2022, arXiv:2203.02155)",
    }
    return [
        Component(
            name=name,
            target=f"nxdt_plugin_preference.objectives:{name.title()}",
            config=f"nxdt_plugin_preference.config:{name.title()}Config",
            summary=summary,
        )
        for name, summary in summaries.items()
    ]


@hookimpl
def nxdt_datasets() -> list[Component]:
    """Declare the answers that they are trained on."""
    return [
        Component(
            name="preference",
            target="nxdt_plugin_preference.loader:PreferenceData",
            config="nxdt_plugin_preference.config:PreferenceConfig",
            summary="prompts with a chosen and a rejected answer",
        ),
        Component(
            name="unpaired-preference",
            target="nxdt_plugin_preference.loader:UnpairedData",
            config="nxdt_plugin_preference.config:UnpairedConfig",
            summary="prompts with an answer that is desirable or not",
        ),
    ]


@hookimpl
def nxdt_validate_config(context: ValidateConfigContext) -> Iterator[ConfigFinding]:
    """Report a dataset of nxdt without the answers that the loss compares, a reference that would train, and prompts
    that leave no room for answers."""
    (plugin, _, objective), data = context.components["objective"].partition(":"), context.config["data"]
    dataset = context.kernel.registry.get("dataset", context.components["dataset"])
    if plugin == "preference":
        wanted = "unpaired-preference" if objective == "kto" else "preference"
        if dataset.dist.startswith("nxdt-plugin-") and dataset.qualified_name != f"preference:{wanted}":
            takes = "labelled answers" if objective == "kto" else "pairs of answers"
            message = f"the objective {objective!r} takes {takes}, and the dataset {dataset.record.name!r} has none"
            remedy = f"Set data.name to {wanted}, or choose another objective."
            yield ConfigFinding(key="data.name", message=message, remedy=remedy)
        key = "objective.precompute_ref_log_probs"
        if (
            not context.config["objective"].get("precompute_ref_log_probs", True)
            and "adapter" not in context.components
        ):
            message = "the reference of each step is the frozen base of an adapter, and the run has none"
            yield ConfigFinding(key=key, message=message, remedy="Set it to true, or adapter.name to lora.")
    if dataset.qualified_name in ("preference:preference", "preference:unpaired-preference"):
        longest, length = data["max_prompt_length"], data["seq_length"]
        if longest is not None and longest >= length:
            message = f"a prompt of {longest} tokens leaves no room for answers in data.seq_length {length}"
            remedy = "Make it smaller than data.seq_length by what answers need."
            yield ConfigFinding(key="data.max_prompt_length", message=message, remedy=remedy)


@hookimpl
def nxdt_config_defaults(context: ConfigDefaultsContext) -> Mapping[str, Any]:
    """Give all weights the learning rate of TRL's trainer, and an adapter's five times DPO's; a reward model's head
    trains next to an adapter."""
    objective, adapter = context.find("objective.name"), context.find("adapter.name")
    saved = {"adapter": {"modules_to_save": ["score"]}} if objective == "reward" and adapter == "lora" else {}
    if context.find("model.optim.name") not in (None, "adam", "adamw"):
        return saved
    if objective not in ("dpo", "cpo", "kto", "orpo", "reward"):
        return saved
    rate = 1e-4 if objective == "reward" else 5e-6 if adapter else 1e-6
    return {**saved, "model": {"optim": {"lr": rate}}}
