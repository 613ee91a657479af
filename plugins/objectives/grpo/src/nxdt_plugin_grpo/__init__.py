"""Entry module of ``nxdt-plugin-grpo``: declares the components, and the kind ``reward``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from nxdt_core.api import Component, ConfigFinding, Kind, hookimpl

if TYPE_CHECKING:
    from nxdt_core.kernel.hookspecs import ConfigDefaultsContext, ValidateConfigContext


@hookimpl
def nxdt_objectives() -> list[Component]:
    """Declare the loss, which generates what it is computed on."""
    return [
        Component(
            name="grpo",
            target="nxdt_plugin_grpo.objective:Grpo",
            config="nxdt_plugin_grpo.config:GrpoConfig",
            summary="group relative policy optimisation (Shao et al. 2024, arXiv:2402.03300)",
        )
    ]


@hookimpl
def nxdt_datasets() -> list[Component]:
    """Declare the prompts."""
    return [
        Component(
            name="prompts",
            target="nxdt_plugin_grpo.prompts:Prompts",
            config="nxdt_plugin_grpo.config:PromptsConfig",
            summary="prompts whose answers a reward function scores",
        )
    ]


@hookimpl
def nxdt_callbacks() -> list[Component]:
    """Declare the table of answers."""
    return [
        Component(
            name="samples",
            target="nxdt_plugin_grpo.samples:Samples",
            config="nxdt_plugin_grpo.config:SamplesConfig",
            summary="answers of some steps of GRPO with their rewards and advantages",
        )
    ]


@hookimpl
def nxdt_kinds() -> list[Kind]:
    """Add the kind of functions that score answers."""
    return [
        Kind(
            name="reward",
            hook="nxdt_components",
            record=Component,
            protocol="nxdt_plugin_grpo.rewards:Reward",
            section="objective.rewards",
            summary="functions that score generated answers",
        )
    ]


@hookimpl
def nxdt_components() -> Mapping[str, Iterable[Component]]:
    """Offer rewards for tasks with a known answer, and for the form of answers."""
    summaries = {
        "match": "1 where what a pattern finds in the answer is the record's solution, else 0",
        "characters": "the share of an answer's characters that the record allows",
        "format": "1 where the whole answer matches a pattern, else 0",
        "length": "0 up to a number of tokens, and less for longer answers",
        "overlong": "from 0 to -1 as an answer comes near to its greatest length (DAPO)",
        "model": "score of a reward model",
        "repetition": "a penalty of token sequences that occur again",
    }
    return {
        "reward": [
            Component(
                name=name,
                target=f"nxdt_plugin_grpo.rewards:{name.title()}",
                config=f"nxdt_plugin_grpo.config:{name.title()}Config",
                summary=summary,
            )
            for name, summary in summaries.items()
        ]
    }


@hookimpl
def nxdt_validate_config(context: ValidateConfigContext) -> Iterator[ConfigFinding]:
    """Report rewards that do not work, a dataset of nxdt without prompts, and answers that leave no room for these."""
    if context.config["objective"]["name"] not in ("grpo", "grpo:grpo"):
        return
    dataset = context.kernel.registry.get("dataset", context.components["dataset"])
    if dataset.dist.startswith("nxdt-plugin-") and dataset.qualified_name != "grpo:prompts":
        message = (
            f"the dataset {dataset.record.name!r} has no prompts, and the objective 'grpo' generates answers to them"
        )
        yield ConfigFinding(key="data.name", message=message, remedy="Set data.name to prompts.")
    most, length = context.config["objective"]["max_completion_length"], context.config["data"]["seq_length"]
    if most >= length:
        message = f"an answer of {most} tokens leaves no room for its prompt in data.seq_length {length}"
        remedy = "Raise data.seq_length, or make it smaller by what prompts need."
        yield ConfigFinding(key="objective.max_completion_length", message=message, remedy=remedy)
    rewards = context.config["objective"]["rewards"]
    engine = context.kernel.registry.get("engine", context.components["engine"]).record
    named = [entry.get("name") if isinstance(entry, Mapping) else entry for entry in rewards]
    if "model" in named and "frozen_model" not in engine.capabilities:
        message = f"the reward 'model' is a second model, and the engine {engine.name!r} runs none"
        yield ConfigFinding(key=f"objective.rewards[{named.index('model')}]", message=message)
    from nxdt_plugin_grpo.rewards import reward_problems

    yield from reward_problems(rewards, context.kernel)


@hookimpl
def nxdt_config_defaults(context: ConfigDefaultsContext) -> Mapping[str, Any]:
    """Give all weights the learning rate of TRL's GRPO, and an adapter's ten times as much."""
    if context.find("objective.name") != "grpo" or context.find("model.optim.name") not in (None, "adam", "adamw"):
        return {}
    return {"model": {"optim": {"lr": 1e-5 if context.find("adapter.name") else 1e-6}}}
