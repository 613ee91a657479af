"""Datasets on the disk as the library writes them, and loaders over them."""

from __future__ import annotations

from pathlib import Path

import datasets
import numpy as np
import pytest
from nxdt_plugin_hf_data.config import HfDataConfig, SourceConfig
from nxdt_plugin_hf_data.loader import HfData

from nxdt_core.data.tokenizers.byte import ByteTokenizer
from nxdt_core.protocols.dataset import DataContext

KJV = Path(__file__).parents[2] / "text/src/nxdt_plugin_text/data/kjv.txt"


@pytest.fixture(autouse=True, scope="session")
def _quiet():
    datasets.disable_progress_bars()


@pytest.fixture(scope="session")
def saved():
    """``saved(path, rows, **columns)``: a dataset with ``rows`` as its ``input_ids``; returns the path."""

    def save(path, rows=None, **columns):
        given = {"input_ids": rows, **columns} if rows is not None else columns
        datasets.Dataset.from_dict(given).save_to_disk(path)
        return path

    return save


@pytest.fixture(scope="session")
def loader():
    """``loader(**keys)``: of these keys of the section, for samples of 8 tokens of a model with 272 rows."""

    def make(seq_length=8, tokenizer="byte", vocab_size=272, seed=1, shuffle=True, **keys):
        if "sources" in keys:
            keys["sources"] = {name: SourceConfig(**source) for name, source in keys["sources"].items()}
        context = DataContext(
            seq_length=seq_length,
            seed=seed,
            tokenizer=ByteTokenizer() if tokenizer == "byte" else tokenizer,
            vocab_size=vocab_size,
            shuffle=shuffle,
        )
        return HfData(HfDataConfig(**keys), context)

    return make


@pytest.fixture(scope="session")
def documents():
    """Lists of ids of many lengths, one of them empty."""
    draws = np.random.default_rng(0)
    return [[], *(draws.integers(0, 272, draws.integers(1, 30)).tolist() for _ in range(39))]


@pytest.fixture(scope="session")
def verses():
    """Texts, one of them empty."""
    return ["", *KJV.read_text().splitlines()[:59]]


@pytest.fixture(scope="session")
def contents():
    """``contents(sample)``: all that it says, comparable."""

    def read(sample):
        fields = (sample.input_ids, sample.labels, sample.position_ids, sample.document_ids)
        return tuple(None if field is None else field.tolist() for field in fields)

    return read
