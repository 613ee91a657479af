"""A plugin file whose engine, model and optimizer declare nothing, and engines whose rules are of every kind."""

from __future__ import annotations

from nxdt_core.api import Component, EngineComponent, ModelComponent, hookimpl
from nxdt_core.protocols.precision import PrecisionPolicy


def odd_heads(settings):
    if settings.values["seed"] == 13:
        yield settings.impossible("seed", reason="13 is unlucky here", advice="Set seed to 14.")


def raising(settings):
    return [settings.values["no.such.key"]]


def float16(config):
    return PrecisionPolicy(name="float16", parameters="float16", gradients="float16", optimizer_state="float16")


def secretly_half(config):
    return PrecisionPolicy(name="secret", parameters="bfloat16", gradients="bfloat16", optimizer_state="bfloat16")


class Engine:
    """Never started."""

    def __init__(self, config):
        raise AssertionError("an engine was built that the run must not have")


@hookimpl
def nxdt_engines():
    target = f"{__name__}:Engine"
    rules = {"odd": f"{__name__}:odd_heads", "raises": f"{__name__}:raising", "lost": f"{__name__}:nowhere"}
    return [
        EngineComponent(name="bare", target=target),
        *(EngineComponent(name=name, target=target, rules=reference) for name, reference in rules.items()),
    ]


@hookimpl
def nxdt_models():
    return [ModelComponent(name="bare-model", target=f"{__name__}:Engine")]


@hookimpl
def nxdt_optimizers():
    config = "nxdt_core.train.optimizers.config:SGDConfig"
    return [Component(name="bare-sgd", target=f"{__name__}:Engine", config=config)]


@hookimpl
def nxdt_precisions():
    return [
        Component(name="secret", target=f"{__name__}:secretly_half"),
        Component(name="float16", target=f"{__name__}:float16"),
    ]
