"""Wrong checkpoint formats, each with one mistake that a real author could make, under the contract.

Not collected by name: ``test_format_mutants.py`` runs this file and expects failures.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from nxdt_testing.format_contract import FormatContract

from nxdt_core.protocols.format import CheckpointFormat, CheckpointReader
from nxdt_core.protocols.tensor_shards import Listing, ShardInfo, TensorKey, TensorSlice
from tests.testing.mutants.small_model import SmallBuilder

MUTANTS: list[type] = []


def mutant(cls: type) -> type:
    MUTANTS.append(cls)
    return cls


class Reader(CheckpointReader):
    step, consumed_samples = 3, 12

    def __init__(self, path: Path) -> None:
        self.tensors: dict[TensorKey, torch.Tensor] = torch.load(path / "model.acme")

    def model_config(self) -> Mapping[str, Any] | None:
        return {"model.name": "small"}

    def chosen(self, weights_only: bool) -> dict[TensorKey, torch.Tensor]:
        return {place: tensor for place, tensor in self.tensors.items() if place[0] == "model" or not weights_only}

    def held(self, tensor: torch.Tensor) -> ShardInfo:
        shape = tuple(tensor.shape)
        return ShardInfo(dtype=str(tensor.dtype).removeprefix("torch."), shape=shape, region=TensorSlice.whole(shape))

    def listing(self, builder: Any, *, weights_only: bool = False) -> Listing:
        return {place: self.held(tensor) for place, tensor in self.chosen(weights_only).items()}

    def read(self, places: Sequence[TensorKey]) -> Iterator[torch.Tensor]:
        for place in places:
            yield self.tensors[place].clone()


@mutant
class Acme(CheckpointFormat):
    """Right: one file of weights and first moments."""

    reader: type = Reader

    def recognises(self, path: Path) -> bool:
        return (path / "model.acme").is_file()

    def open(self, path: Path) -> Any:
        return self.reader(path)


@mutant
class HasNoStep(Acme):
    class reader(Reader):
        step = -1


@mutant
class RecognisesAll(Acme):
    def recognises(self, path: Path) -> bool:
        return path.exists()


@mutant
class LooksInside(Acme):
    def recognises(self, path: Path) -> bool:
        return super().recognises(path) and (path / "model.acme").stat().st_size > 0


@mutant
class DescribesSections(Acme):
    class reader(Reader):
        def model_config(self) -> Mapping[str, Any]:
            return {"model": {"name": "small"}}


@mutant
class KeepsItsNames(Acme):
    class reader(Reader):
        def listing(self, builder: Any, *, weights_only: bool = False) -> Listing:
            found = super().listing(builder, weights_only=weights_only)
            return {(section, f"acme.{name}"): held for (section, name), held in found.items()}


@mutant
class ListsParts(Acme):
    class reader(Reader):
        def held(self, tensor: torch.Tensor) -> ShardInfo:
            half = (max(tensor.shape[0] // 2, 1), *tensor.shape[1:])
            return ShardInfo(dtype="float32", shape=tuple(tensor.shape), region=TensorSlice.whole(half))


@mutant
class NumbersItsState(Acme):
    class reader(Reader):
        def listing(self, builder: Any, *, weights_only: bool = False) -> Listing:
            found = super().listing(builder, weights_only=weights_only).items()
            return {
                (place if place[0] == "model" else ("optim", f"{number}/exp_avg")): held
                for number, (place, held) in enumerate(found)
            }


@mutant
class ListsStateWithTheWeights(Acme):
    class reader(Reader):
        def chosen(self, weights_only: bool) -> dict[TensorKey, torch.Tensor]:
            return self.tensors


@mutant
class ReadsInItsOwnOrder(Acme):
    class reader(Reader):
        def read(self, places: Sequence[TensorKey]) -> Iterator[torch.Tensor]:
            return super().read([place for place in self.tensors if place in places])


@mutant
class ConvertsOnTheWay(Acme):
    class reader(Reader):
        def read(self, places: Sequence[TensorKey]) -> Iterator[torch.Tensor]:
            return (tensor.bfloat16() for tensor in super().read(places))


@mutant
class ReadsFromTheBeginning(Acme):
    class reader(Reader):
        def read(self, places: Sequence[TensorKey]) -> Iterator[torch.Tensor]:
            return super().read(list(self.tensors)[: len(places)])


@mutant
class ReadsNothing(Acme):
    class reader(Reader):
        def read(self, places: Sequence[TensorKey]) -> Iterator[torch.Tensor]:
            return (torch.zeros_like(tensor) for tensor in super().read(places))


def under_contract(format_type: type) -> type[FormatContract]:
    class Contract(FormatContract):
        @pytest.fixture
        def format(self):
            return format_type()

        @pytest.fixture
        def builder(self):
            return SmallBuilder()

        @pytest.fixture
        def source(self, tmp_path, builder):
            directory = tmp_path / "model"
            directory.mkdir()
            weights = {name: weight.detach() for name, weight in builder.build().named_parameters()}
            tensors = {("model", name): weight for name, weight in weights.items()}
            tensors |= {("optim", f"{name}/exp_avg"): weight / 2 for name, weight in weights.items()}
            torch.save(tensors, directory / "model.acme")
            return directory

    return Contract


for _mutant in MUTANTS:
    globals()[f"Test{_mutant.__name__}"] = under_contract(_mutant)
