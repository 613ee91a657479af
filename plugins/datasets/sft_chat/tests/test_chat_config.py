"""Combinations that cannot work are found before any file is read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from nxdt_plugin_sft_chat.config import ChatConfig, ChatSource

from nxdt_core.config import load
from nxdt_core.errors import NxdtError

FILES, ONE = (Path("a.jsonl"),), Path("b.jsonl")


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        ({}, "train_files"),
        ({"train_files": FILES, "train_dir": ONE}, "train_dir"),
        ({"train_files": FILES, "validation_files": FILES, "val_dir": ONE}, "val_dir"),
        ({"train_files": FILES, "validation_fraction": 1.0}, "validation_fraction"),
        ({"train_files": FILES, "validation_fraction": 0.1, "val_dir": ONE}, "validation_fraction"),
        ({"test_dir": ONE, "validation_fraction": 0.1}, "validation_fraction"),
        ({"train_files": FILES, "chat_template": "chatml", "chat_template_file": ONE}, "chat_template_file"),
        ({"train_files": FILES, "train_roles": ()}, "train_roles"),
        ({"train_files": FILES, "sources": {"a": ChatSource(train_files=FILES)}}, "train_files"),
        ({"sources": {"a": ChatSource()}}, "sources.a.train_files"),
        ({"sources": {"a": ChatSource(train_files=FILES, weight=0)}}, "sources.a.weight"),
        ({"train_files": FILES, "template_date": "yesterday"}, "template_date"),
    ],
)
def test_what_cannot_work_is_named_by_key(keys, key):
    assert [found for found, _ in ChatConfig(**keys).check()] == [key]


def test_a_colon_without_a_space_is_named():
    with pytest.raises(NxdtError, match=r"data\.columns: .*Write a space after the colon: \{prompt: question\}\."):
        load("recipe:llama-tiny-sft", ["data.columns={prompt:question}"])


def test_the_older_spelling_names_one_path():
    config = ChatConfig(train_dir=ONE, validation_files=FILES)
    assert list(config.check()) == []
    assert (config.files("train"), config.files("validation"), config.files("test")) == ((ONE,), FILES, ())


def test_a_source_takes_the_keys_of_the_section_that_it_does_not_set():
    own = ChatSource(train_files=FILES, chat_template="llama3", dev_choose_samples=3)
    config = ChatConfig(sources={"own": own, "other": ChatSource(train_files=FILES)}, chat_template_file=ONE)
    assert list(config.check()) == []
    found = config.of_source("own")
    assert (found.chat_template, found.chat_template_file, found.dev_choose_samples) == ("llama3", None, 3)
    assert config.of_source("other").chat_template_file == ONE


def test_entry_module_and_config_need_neither_torch_nor_numpy():
    program = """
import sys
sys.modules.update(torch=None, numpy=None, transformers=None, jinja2=None)
import nxdt_plugin_sft_chat, nxdt_plugin_sft_chat.config
print(nxdt_plugin_sft_chat.nxdt_datasets()[0].name)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "sft-chat\n"
