"""Every kind of dataset of the plugin keeps what the core expects of a dataset."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from nxdt_testing.dataset_contract import DatasetContract, MirroredBytes


class Kept(DatasetContract):
    """``columns`` is what is saved; ``keys`` what the section says beside where."""

    def keys(self):
        return {}

    def columns(self, offset=0):
        return {"input_ids": [[(7 * row + place + offset) % 272 for place in range(8)] for row in range(40)]}

    @pytest.fixture
    def opened(self, loader, saved, tmp_path):
        def make(offset=0, **run):
            path = tmp_path / str(offset)
            if not path.exists():
                saved(path, **self.columns(offset))
            return loader(train_dir=path, **self.keys(), **run).split("train")

        return make

    @pytest.fixture
    def make(self, opened):
        return opened

    @pytest.fixture
    def changed(self, opened):
        return opened(1)

    @pytest.fixture
    def variants(self, opened):
        found = {"seed": opened(seed=7), "tokenizer": opened(tokenizer=MirroredBytes())}
        rows = "input_ids" in self.columns() and not self.keys().get("packing")
        return found if rows else {**found, "seq_length": opened(seq_length=6)}


class TestRows(Kept):
    pass


class TestRowsWithLabels(Kept):
    def columns(self, offset=0):
        ids = super().columns(offset)["input_ids"]
        return {"input_ids": ids, "labels": [[-100, -100, *row[2:]] for row in ids]}


class TestPaddedRows(Kept):
    def keys(self):
        return {"packing": False}

    def columns(self, offset=0):
        return {"input_ids": [row[: 3 + number % 6] for number, row in enumerate(super().columns(offset)["input_ids"])]}


class TestDocuments(TestPaddedRows):
    def keys(self):
        return {"packing": True}


class TestTexts(Kept):
    def columns(self, offset=0):
        return {"text": [f"verse {number + offset} of {'many ' * (number % 5)}" for number in range(60)]}


class TestStream(TestDocuments):
    def keys(self):
        return {"packing": True, "streaming": True, "shuffle": False}


class TestStreamOfTexts(TestTexts):
    def keys(self):
        return {"streaming": True, "shuffle": False}


class TestShuffledStream(TestStreamOfTexts):
    def keys(self):
        return {"streaming": True, "shuffle_block": 6}

    @pytest.fixture
    def opened(self, loader, tmp_path):
        def make(offset=0, **run):
            path = tmp_path / str(offset)
            if not path.exists():
                path.mkdir()
                texts = self.columns(offset)["text"]
                for number in range(3):
                    pq.write_table(pa.table({"text": texts[number::3]}), path / f"{number}.parquet")
            return loader(train_dir=path, **self.keys(), **run).split("train")

        return make


class TestMixture(Kept):
    @pytest.fixture
    def opened(self, loader, saved, tmp_path):
        def make(offset=0, **run):
            sources = {}
            for name, weight, shift in (("a", 1.0, offset), ("b", 2.5, 100)):
                path = tmp_path / f"{name}-{shift}"
                if not path.exists():
                    saved(path, **self.columns(shift))
                sources[name] = {"train_dir": path, "weight": weight}
            return loader(sources=sources, **self.keys(), **run).split("train")

        return make


class TestMixtureOfStreams(TestMixture):
    def keys(self):
        return {"streaming": True, "shuffle": False}
