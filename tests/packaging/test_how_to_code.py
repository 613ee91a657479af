"""Code blocks of the how-to pages, in the place that their text names."""

import ast
import importlib
import re
import shlex
from pathlib import Path

import pytest
import yaml

from nxdt_core.config import check, load
from nxdt_core.kernel import Kernel
from nxdt_core.run import train

PAGES = {path.stem: path.read_text() for path in (Path(__file__).parents[2] / "docs/how-to").glob("*.md")}
SMALL = (
    *("model.num_layers=1", "model.hidden_size=16", "model.ffn_hidden_size=32", "model.num_attention_heads=2"),
    *("model.num_kv_heads=1", "data.seq_length=64", "data.global_batch_size=2", "data.micro_batch_size=1"),
    *("trainer.max_steps=1", "trainer.accelerator=cpu", "trainer.val_check_interval=null"),
)


def blocks(page, language):
    return re.findall(rf"```{language}\n(.*?)```", PAGES[page], re.DOTALL)


OTHERS = {"groups", "livenessProbe", "instance_type"}
"""Keys of Prometheus, of Kubernetes and of a platform's file."""
YAML = [
    (page, number)
    for page in PAGES
    for number, block in enumerate(blocks(page, "yaml"))
    if not OTHERS & yaml.safe_load(block).keys()
]


@pytest.fixture(scope="module")
def kernel():
    return Kernel.start()


@pytest.mark.parametrize(("page", "number"), YAML)
def test_yaml_has_known_keys_and_values(page, number, kernel, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    block = yaml.safe_load(blocks(page, "yaml")[number])
    around = "recipe:llama-tiny-grpo" if page == "grpo" else "recipe:llama-tiny"
    longer = () if "base" in block else ("model.max_position_embeddings=1024",)
    longer += ("data.seq_length=1024",) if page == "grpo" else ()
    found = check({"base": around, "name": "run", **block}, longer, kernel=kernel)
    assert [each.row() for each in found if "/models/" not in each.what()] == []


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python") and page != "serve"])
def test_python_imports_what_exists(page):
    for node in (node for block in blocks(page, "python") for node in ast.parse(block).body):
        if isinstance(node, ast.ImportFrom):
            module = importlib.import_module(node.module)
            assert [name.name for name in node.names if not hasattr(module, name.name)] == []
        elif isinstance(node, ast.Import):
            assert all(importlib.import_module(name.name) for name in node.names)


def test_the_reward_of_a_local_file_scores_answers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (code,) = blocks("grpo", "python")
    (line,) = re.findall(r"nxdt train (.*my_rewards.py.*)", PAGES["grpo"])
    Path("my_rewards.py").write_text(code)
    source, *overrides = shlex.split(line)
    config = load(source, overrides)
    reward = config.kernel.registry.get("reward", "short").load_target()()
    assert reward(["abc", ""], [{}, {}]) == [-0.03, 0]


def test_the_program_that_generates_prints_texts(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    train(load("recipe:llama-tiny-sft", [*SMALL, "data.truncation=drop", "name=my_run"]))
    (code,) = blocks("generation", "python")
    exec(code, {})
    assert capsys.readouterr().out
