"""A model is written as a Hugging Face directory and read back: tests of the contract of models."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import nn

from nxdt_core.config import ReadsHFConfig
from nxdt_core.config.read import read_part
from nxdt_core.config.tree import DEFAULT, Tree
from nxdt_core.errors.models import HFExchangeUnsupported
from nxdt_core.hf.directory import load_hf, save_hf
from nxdt_core.hf.key_map import sources
from nxdt_core.models.patterns import matches_any
from nxdt_core.protocols.model import ModelBuilder
from nxdt_testing.model_plan import tokens
from nxdt_testing.runs.run import built

__all__ = ["ModelExchange"]


class ModelExchange:
    """The tests of what is exchanged."""

    exchanges_with_hf: ClassVar[bool] = True
    """False for a kind of model that has no form there although the builder exchanges others."""

    @pytest.fixture
    def exchange(self, builder: ModelBuilder) -> ModelBuilder:
        """Return the builder as one that exchanges with Hugging Face; tests of others are skipped."""
        with suppress(HFExchangeUnsupported):
            if self.exchanges_with_hf and builder.hf_key_map():
                return builder
        pytest.skip(f"this model of {type(builder).__name__} is not exchanged with Hugging Face")

    def test_a_directory_has_every_parameter_once_and_comes_back(
        self, builder: ModelBuilder, exchange: ModelBuilder, model: nn.Module, tmp_path: Path
    ) -> None:
        """Under one name each, bit for bit; rows that fill a parameter up are not in the directory."""
        found, state = sources(builder), model.state_dict()
        names = [name for source in found for name in source.hf_names]
        assert len(set(names)) == len(names)
        save_hf(tmp_path / "out", builder, state)
        again = load_hf(tmp_path / "out", builder)
        users = {user for _, user in builder.plan().tied}
        assert again.keys() == {name for name, _ in model.named_parameters(remove_duplicate=False)} - users
        for source in found:
            rows = source.sections[0] if source.transform == "pad" else None
            assert torch.equal(again[source.name][:rows], state[source.name][:rows]), source.name

    def test_its_config_json_names_an_architecture_that_it_reads(self, exchange: ModelBuilder) -> None:
        """Find the builder by a name or a pattern of ``hf_architectures``."""
        names = exchange.config_to_hf()["architectures"]
        assert names
        assert all(matches_any(exchange.hf_architectures, name) for name in names)

    def test_its_config_json_is_read_back(
        self, builder: ModelBuilder, exchange: ModelBuilder, model: nn.Module, tmp_path: Path
    ) -> None:
        """Read the file by ``from_hf``, to a model that computes the same and writes the same ``config.json``."""
        written = json.loads(json.dumps(exchange.config_to_hf()))
        cls = type(getattr(builder, "config", None))  # what the builder was called with
        assert issubclass(cls, ReadsHFConfig), f"add the class method from_hf(hf) to {cls.__qualname__}"
        section = Tree({}, {(): DEFAULT})
        for key, value in cls.from_hf(written).items():
            section.set(key, value, DEFAULT)
        config, problems = read_part(cls, section, "model")
        assert not problems, f"its section does not take what from_hf returns: {'; '.join(map(str, problems))}"
        again = type(builder)(config)
        assert json.loads(json.dumps(again.config_to_hf())) == written
        save_hf(tmp_path / "out", builder, model.state_dict())
        other = built(again).eval()
        other.load_state_dict(load_hf(tmp_path / "out", again), strict=False)  # of tied parameters it has one
        ids = tokens(again, 2, 9)
        found = other(ids)
        expected = model(ids)[..., : found.shape[-1]]  # rows that fill a vocabulary up are not written
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
