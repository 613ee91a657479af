"""Formats that plugins bring: ``nxdt checkpoint import`` finds them, and names those that are or could be installed."""

from __future__ import annotations

import json
from textwrap import dedent

import pytest

pytest.importorskip("nxdt_plugin_llama", reason="nxdt-plugin-llama is not installed")

MODEL = (
    *("recipe:llama-tiny", "model.num_layers=1", "model.hidden_size=8", "model.ffn_hidden_size=16"),
    *("model.num_attention_heads=2", "model.num_kv_heads=2"),
)
ENTRY = dedent("""
    from nxdt_core.api import Component, hookimpl

    @hookimpl
    def nxdt_formats():
        return [Component(name="{name}", target="{module}:Format", summary="a directory with {file}")]
""")
FORMAT = dedent("""
    import torch
    from nxdt_core.protocols.format import CheckpointFormat, CheckpointReader
    from nxdt_core.protocols.tensor_shards import TensorSlice, ShardInfo

    class Reader(CheckpointReader):
        step = consumed_samples = 0

        def model_config(self):
            return None

        def listing(self, builder, *, weights_only=False):
            named = dict(builder.build().named_parameters())
            held = {{name: tuple(each.shape) for name, each in named.items()}}
            return {{
                ("model", n): ShardInfo(dtype="float32", shape=s, region=TensorSlice.whole(s)) for n, s in held.items()
            }}

        def read(self, places):
            from nxdt_core.config import load
            from nxdt_core.train import build

            model = build.model_builder(load({model!r}, {keys!r})).build()
            named = dict(model.named_parameters())
            yield from (torch.full_like(named[name].detach(), 0.5) for _, name in places)

    class Format(CheckpointFormat):
        def recognises(self, path):
            return (path / "{file}").exists()

        def open(self, path):
            return Reader()
""")


@pytest.fixture
def acme(dist):
    """A third party's distribution with the format ``acme``."""
    source = FORMAT.format(file="model.acme", model=MODEL[0], keys=list(MODEL[1:]))
    dist("nxdt_acme", ENTRY.format(name="acme", module="acme_format", file="model.acme"), acme_format=source)


def directory(work, *files):
    (work / "theirs").mkdir()
    for file in files:
        (work / "theirs" / file).write_text("{}")


@pytest.mark.parametrize("words", [(), ("--format", "acme"), ("--format", "nxdt_acme:acme")])
@pytest.mark.usefixtures("acme")
def test_a_format_of_a_third_party_is_found_and_read(nxdt, work, words):
    directory(work, "model.acme")
    done = nxdt("checkpoint", "import", "theirs", "store", "--json", *words, "--config", *MODEL)
    assert done.returncode == 0, done.stderr
    imported = json.loads(done.stdout)
    assert (imported["format"], imported["model"], imported["step"]) == ("acme", "llama", 0)
    listed = nxdt("checkpoint", "list", "store", "--json")
    assert [row["state"] for row in json.loads(listed.stdout)] == ["committed"]


@pytest.mark.usefixtures("acme")
def test_a_run_begins_with_such_a_directory(nxdt, work):
    directory(work, "model.acme")
    start = ("checkpoint.resume_from=theirs", "checkpoint.weight_init_only=true", "trainer.max_steps=1")
    done = nxdt("train", *MODEL, *start, "data.seq_length=32", "data.global_batch_size=2", "trainer.accelerator=cpu")
    assert done.returncode == 0, done.stderr
    assert "starting from the weights of" in done.stdout + done.stderr


@pytest.mark.usefixtures("acme")
def test_two_formats_that_recognise_one_directory_are_both_named(nxdt, work):
    directory(work, "model.acme", "config.json")
    done = nxdt("checkpoint", "import", "theirs", "store", "--config", *MODEL)
    assert done.returncode == 2
    assert "[NXDT-K003]" in done.stderr
    assert "'nxdt_acme:acme' or 'builtin:hf'" in done.stderr
    preferred = nxdt("checkpoint", "import", "theirs", "store", "--config", *MODEL, "plugins.prefer=[nxdt_acme]")
    assert preferred.returncode == 0, preferred.stderr


def test_what_nothing_recognises_is_told_with_what_is_installed_and_what_could_be(nxdt, dist, work):
    broken = FORMAT.format(file="model.acme", model="", keys=[]).replace("import torch", "import missing_here", 1)
    dist("nxdt_acme", ENTRY.format(name="acme", module="acme_format", file="model.acme"), acme_format=broken)
    directory(work, "model.onnx")
    done = nxdt("checkpoint", "import", "theirs", "store")
    assert done.returncode == 2
    assert "[NXDT-S070] 'theirs' is not a checkpoint that can be imported" in done.stderr
    assert "hf: a Hugging Face directory with config.json" in done.stderr
    assert "The checkpoint format 'acme' of nxdt_acme is skipped" in done.stderr
    assert not (work / "store").exists()


def test_a_format_that_no_installed_plugin_offers_names_its_distribution(nxdt, work):
    directory(work, "model.onnx")
    for words in ((), ("--format", "neuronx")):
        done = nxdt("checkpoint", "import", "theirs", "store", *words, uninstalled=("nxdt-plugin-migrate",))
        assert done.returncode == 2
        assert "pip install nxdt-plugin-migrate" in done.stderr
