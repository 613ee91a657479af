"""Tests that every checkpoint format must pass; its author subclasses it once.

Example, the whole test file of a plugin::

    from nxdt_testing.format_contract import FormatContract

    class TestAcmeFormat(FormatContract):
        @pytest.fixture
        def format(self):
            return AcmeFormat()

        @pytest.fixture
        def builder(self):
            return TinyBuilder(TinyConfig())

        @pytest.fixture
        def source(self, tmp_path, builder):
            return write_acme(tmp_path / "model", builder)
"""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
import torch

from nxdt_core.checkpoint.format.tensor_index import ITEM_BYTES
from nxdt_core.distributed.devices import HOST
from nxdt_core.protocols.format import CheckpointFormat, CheckpointReader
from nxdt_core.protocols.model import ModelBuilder
from nxdt_core.protocols.tensor_shards import Listing, ShardInfo, TensorSlice

__all__ = ["FormatContract"]


class FormatContract:
    """Override the fixtures ``format``, ``builder`` and ``source``."""

    @pytest.fixture
    def format(self) -> CheckpointFormat:
        """Return the format under test; override it."""
        raise NotImplementedError("override the fixture 'format'")

    @pytest.fixture
    def builder(self) -> ModelBuilder:
        """Return the builder of a small model that the format can hold."""
        raise NotImplementedError("override the fixture 'builder'")

    @pytest.fixture
    def source(self, tmp_path: Path, builder: ModelBuilder) -> Path:
        """Return a checkpoint of the model of ``builder``, below ``tmp_path``, with optimizer state if the format has
        any."""
        raise NotImplementedError("override the fixture 'source'")

    @pytest.fixture
    def reader(self, format: CheckpointFormat, source: Path) -> CheckpointReader:
        """Return what reads the checkpoint."""
        return format.open(source)

    def test_it_has_the_members_of_the_protocol(self, format: CheckpointFormat, reader: CheckpointReader) -> None:
        """Check the members of the format, and those of its reader."""
        assert isinstance(format, CheckpointFormat), "inherit from nxdt_core.protocols.format.CheckpointFormat"
        assert isinstance(reader, CheckpointReader), "inherit from nxdt_core.protocols.format.CheckpointReader"
        assert reader.step >= 0
        assert reader.consumed_samples >= 0

    def test_it_recognises_its_own_checkpoints_alone(
        self, format: CheckpointFormat, source: Path, tmp_path: Path
    ) -> None:
        """An empty directory, a text file and a path without a file are none."""
        assert format.recognises(source)
        other = tmp_path / "other"
        other.mkdir()
        (other / "README.md").write_text("# Other")
        assert [path for path in (other, other / "README.md", other / "none") if format.recognises(path)] == []

    def test_it_recognises_by_names_alone(self, format: CheckpointFormat, source: Path, tmp_path: Path) -> None:
        """Every run that begins with a path asks: no file is read."""
        emptied = tmp_path / "emptied" / source.name
        if source.is_file():
            emptied.parent.mkdir()
            emptied.touch()
        else:
            shutil.copytree(source, emptied, copy_function=lambda _, target: Path(target).touch())
        assert format.recognises(emptied)

    def test_model_config_gives_dotted_keys_or_nothing(self, reader: CheckpointReader) -> None:
        """They become the configuration of the import."""
        keys = reader.model_config()
        assert keys is None or all("." in key for key in keys)

    def test_every_parameter_is_listed_once_and_whole(self, reader: CheckpointReader, builder: ModelBuilder) -> None:
        """Under its global name, with the shape that the model gives it; tied parameters under their owner."""
        listed = _section(reader.listing(builder), "model")
        assert {name: entry.shape for name, entry in listed.items()} == _shapes(builder)
        assert [name for name, entry in listed.items() if entry.region != TensorSlice.whole(entry.shape)] == []
        assert {entry.dtype for entry in listed.values()} <= set(ITEM_BYTES)

    def test_optimizer_state_is_of_parameters(self, reader: CheckpointReader, builder: ModelBuilder) -> None:
        """``<parameter>/<kind>``, as large as its parameter or one number."""
        shapes = _shapes(builder)
        for name, entry in _section(reader.listing(builder), "optim").items():
            parameter, _, kind = name.rpartition("/")
            assert kind
            assert entry.shape in (shapes[parameter], ())

    def test_weights_can_be_listed_alone(self, reader: CheckpointReader, builder: ModelBuilder) -> None:
        """Without optimizer state, and all of them."""
        listing = reader.listing(builder, weights_only=True)
        assert {section for section, _ in listing} == {"model"}
        assert {name for _, name in listing} == set(_shapes(builder))

    def test_tensors_are_what_was_listed(self, reader: CheckpointReader, builder: ModelBuilder) -> None:
        """Whole, contiguous, on the host, finite, in the order that was asked for."""
        listing = reader.listing(builder)
        places = list(listing)[::-1]
        for place, tensor in zip(places, reader.read(places), strict=True):
            entry = listing[place]
            assert (tuple(tensor.shape), str(tensor.dtype)) == (entry.shape, f"torch.{entry.dtype}"), place
            assert tensor.device == HOST
            assert tensor.is_contiguous()
            assert tensor.isfinite().all()

    def test_a_share_of_the_tensors_is_what_all_of_them_are(
        self, format: CheckpointFormat, source: Path, reader: CheckpointReader, builder: ModelBuilder
    ) -> None:
        """Ranks divide the tensors; what one reads does not depend on the others."""
        everything = _read(format.open(source), builder)
        mine = list(reader.listing(builder))[1::2]
        assert all(torch.equal(tensor, everything[p]) for p, tensor in zip(mine, reader.read(mine), strict=True))

    def test_the_model_takes_the_weights(self, reader: CheckpointReader, builder: ModelBuilder) -> None:
        """Each parameter gets its own state, and not all are equal."""
        weights = {name: tensor for (section, name), tensor in _read(reader, builder).items() if section == "model"}
        built = builder.build()
        missing, unexpected = built.load_state_dict(weights, strict=False)
        users = {user for _, user in builder.plan().tied}
        parameters = {name for name, _ in built.named_parameters(remove_duplicate=False)}
        assert set(missing) & parameters <= users
        assert unexpected == []
        matrices = [weight for weight in weights.values() if weight.dim() > 1 and math.prod(weight.shape) > 1]
        assert any(weight.float().std() > 0 for weight in matrices)


def _shapes(builder: ModelBuilder) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        named = dict(builder.build().named_parameters(remove_duplicate=False))
    users = {user for _, user in builder.plan().tied}
    return {name: tuple(parameter.shape) for name, parameter in named.items() if name not in users}


def _section(listing: Listing, section: str) -> dict[str, ShardInfo]:
    return {name: entry for (of, name), entry in listing.items() if of == section}


def _read(reader: CheckpointReader, builder: ModelBuilder) -> dict[tuple[str, str], torch.Tensor]:
    places = list(reader.listing(builder))
    return {place: tensor.clone() for place, tensor in zip(places, reader.read(places), strict=True)}
