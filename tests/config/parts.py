"""A plugin file with one component of several kinds, as the tests of the configuration need them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from nxdt_core.api import Component, ConfigFinding, ModelComponent, StoreComponent, hookimpl
from nxdt_core.config.section import PositiveInt, Range, SecretText, Section


class RopeScaling(Section):
    """Nested section."""

    factor: float = 1.0
    kind: Literal["linear", "llama3"] = "linear"


class TinyConfig(Section):
    """A model."""

    hidden_size: PositiveInt
    """Width."""
    num_layers: PositiveInt = 2
    num_attention_heads: PositiveInt = Field(default=4, description="Heads of attention.")
    num_kv_heads: PositiveInt | None = None
    vocab_size: PositiveInt = 256
    dropout: Annotated[float, Range(0, 1)] = 0.0
    rope_scaling: RopeScaling | None = None
    betas: tuple[float, float] = (0.9, 0.95)

    def check(self) -> Iterable[tuple[str, str]]:
        if self.hidden_size % self.num_attention_heads:
            yield "num_attention_heads", f"{self.hidden_size} does not divide by {self.num_attention_heads}"

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Mapping[str, Any]:
        if hf.get("model_type") != "tiny":
            raise ValueError(f"it describes a {hf.get('model_type')!r}, not a 'tiny'")
        return {"hidden_size": hf["hidden_size"], "num_layers": hf["num_hidden_layers"]}


class PlainConfig(Section):
    """A model that reads no ``config.json``."""

    hidden_size: PositiveInt = 8


class FaultyConfig(PlainConfig):
    """A model whose author forgot what its ``from_hf`` reads with."""

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Mapping[str, Any]:
        return cls.hf_family.read(hf)


class LinesConfig(Section):
    """A dataloader."""

    files: tuple[Path, ...] = ()
    text_key: str = "text"
    packing: bool = False
    shuffle: bool = False


class FussyConfig(Section):
    """Raises in its own ways."""

    lr: float = 0.1
    mode: str = "fine"

    def model_post_init(self, context: Any, /) -> None:
        if self.mode == "post_init":
            raise ValueError("mode post_init is never right")

    def check(self) -> Iterable[tuple[str, str]]:
        if self.mode == "crash":
            raise ZeroDivisionError("boom")
        return []


class Handle:
    """No value of YAML."""


class BrokenConfig(Section):
    """Has an annotation that no YAML value can have."""

    handle: Handle | None = None


class CsvConfig(Section):
    """A logger."""

    flush_every: PositiveInt = 10


class Account(Section):
    """An item of a list."""

    user: str
    password: SecretText


class BoardConfig(Section):
    """A logger at a server."""

    prefix: str = ""
    token: SecretText | None = None
    headers: Mapping[str, SecretText] = Field(default_factory=dict)
    accounts: tuple[Account, ...] = ()
    address: str | None = None


class MemoryConfig(Section):
    """A store."""

    parts: PositiveInt = 4


@hookimpl
def nxdt_models():
    return [
        ModelComponent(
            name="tiny",
            target="tiny:Builder",
            config=f"{__name__}:TinyConfig",
            hf_architectures=("TinyForCausalLM",),
            capabilities=frozenset({"tp", "sp", "pp", "cp", "ep"}),
        ),
        ModelComponent(name="bare", target="tiny:Bare"),
        ModelComponent(name="plain", target="tiny:Plain", config=f"{__name__}:PlainConfig"),
        ModelComponent(name="faulty", target="tiny:Plain", config=f"{__name__}:FaultyConfig"),
    ]


@hookimpl
def nxdt_datasets():
    return [Component(name="lines", target="tiny:Lines", config=f"{__name__}:LinesConfig")]


@hookimpl
def nxdt_optimizers():
    return [
        Component(name="fussy", target="tiny:fussy", config=f"{__name__}:FussyConfig"),
        Component(name="broken", target="tiny:broken", config=f"{__name__}:BrokenConfig"),
        Component(name="lost", target="tiny:lost", config="no_such_package.config:Config"),
    ]


@hookimpl
def nxdt_stores():
    return [StoreComponent(name="memory", target="tiny:M", config=f"{__name__}:MemoryConfig", uri_schemes=("memory",))]


@hookimpl
def nxdt_callbacks():
    return [
        Component(name="csv", target="tiny:csv", config=f"{__name__}:CsvConfig"),
        Component(name="board", target="tiny:board", config=f"{__name__}:BoardConfig"),
        Component(name="beep", target="tiny:beep"),
    ]


@hookimpl
def nxdt_config_defaults(context):
    return {"trainer": {"log_every_n_steps": 7}} if context.config.get("name") == "wants-defaults" else {}


@hookimpl
def nxdt_validate_config(context):
    if context.config["trainer"]["max_steps"] == 13:
        return [ConfigFinding(key="trainer.max_steps", message="13 is unlucky", remedy="Write 14.")]
    return []
