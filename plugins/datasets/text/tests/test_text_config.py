"""Combinations that cannot work are found before any file is read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from nxdt_plugin_text.config import TextConfig

from nxdt_core.config import load
from nxdt_core.train import build

FILES = (Path("a.txt"),)


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        ({}, "train_files"),
        ({"train_files": FILES, "validation_fraction": 1.0}, "validation_fraction"),
        ({"train_files": FILES, "validation_fraction": 0.1, "validation_files": FILES}, "validation_fraction"),
        ({"test_files": FILES, "validation_fraction": 0.1}, "validation_fraction"),
        ({"train_files": FILES, "document_separator": ""}, "document_separator"),
        ({"train_files": FILES, "eod_mask_loss": True, "add_eos": False}, "eod_mask_loss"),
    ],
)
def test_what_cannot_work_is_named_by_key(keys, key):
    assert [found for found, _ in TextConfig(**keys).check()] == [key]


@pytest.mark.parametrize(
    "keys",
    [
        {"train_files": FILES},
        {"validation_files": FILES},
        {"train_files": FILES, "validation_fraction": 0.5, "test_files": FILES},
    ],
)
def test_what_can_work_has_no_findings(keys):
    assert list(TextConfig(**keys).check()) == []


def test_entry_module_and_config_need_neither_torch_nor_numpy():
    program = """
import sys
sys.modules.update(torch=None, numpy=None)
import nxdt_plugin_text, nxdt_plugin_text.config
print(nxdt_plugin_text.nxdt_datasets()[0].name)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "text\n"


def test_prompts_of_a_run_begin_as_its_documents():
    for added in (False, True):
        config = load("recipe:llama-tiny", [f"data.add_bos={str(added).lower()}"])
        assert build.chat_keys(config).add_bos == added
