"""Selecting components, and what they bring to the schema."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nxdt_core import config
from nxdt_core.kernel import Kernel, PluginPolicy


def names(resolved):
    return {slot: chosen and chosen.component.record.name for slot, chosen in resolved.components.items()}


def test_defaults_select_the_builtins(load, good):
    assert names(load(good)) == {
        "model": "tiny",
        "dataset": "lines",
        "tokenizer": None,
        "optimizer": "adamw",
        "schedule": "constant",
        "precision": "fp32",
        "store": "local",
        "objective": "causal_lm",
        "adapter": None,
        "engine": "torch",
    }


@pytest.mark.parametrize(
    ("override", "slot", "name"),
    [
        ("model.name=parts:tiny", "model", "tiny"),
        ("data.tokenizer=byte", "tokenizer", "byte"),
        ("data.tokenizer={type: some/dir}", "tokenizer", "huggingface"),
        ("model.optim.sched=cosine", "schedule", "CosineAnnealing"),
        ("checkpoint.uri=memory://a/b", "store", "memory"),
        ("checkpoint.uri=/plain/path", "store", "local"),
        ("checkpoint={uri: memory://a, storage: {name: memory, parts: 2}}", "store", "memory"),
        ("precision=autocast", "precision", "autocast"),
        ("objective=causal_lm", "objective", "causal_lm"),
        ("parallel_engine=builtin:torch", "engine", "torch"),
    ],
)
def test_names_aliases_and_rules_select(load, good, override, slot, name):
    assert names(load(good, override))[slot] == name


@pytest.mark.parametrize(
    ("overrides", "key", "sentences"),
    [
        (["data.name=null"], "data.name", ["'hf-data'", "follows from the default", "nxdt-plugin-hf-data"]),
        (["model.name=null"], "model.name", ["'llama'", "nxdt-plugin-llama"]),
        (["model.optim.name=fusssy"], "model.optim.name", ["Did you mean 'fussy'?"]),
        (["model.optim.name=lost"], "model.optim.name", ["module 'no_such_package.config' does not exist"]),
        (["checkpoint.uri=s3://bucket"], "checkpoint.uri", ["s3:// addresses", "nxdt-plugin-s3"]),
        (["adapter=lora"], "adapter.name", ["'lora'", "nxdt-plugin-lora"]),
        (["exp_manager.loggers=[cvs]"], "exp_manager.loggers[0]", ["'cvs'", "'csv'"]),
        (["trainer.callbacks=[boop]"], "trainer.callbacks[0]", ["'boop'"]),
    ],
)
def test_a_component_that_cannot_be_had_is_one_row_with_the_kernel_s_hints(report, good, overrides, key, sentences):
    (row,) = report(good, *overrides)
    assert row.startswith(f"command line: {key}: ")
    assert "[NXDT-K0" in row
    for sentence in sentences:
        assert sentence in row


def test_a_model_without_a_name_is_a_llama_and_a_note_says_so(good, tmp_path):
    plugin = tmp_path / "models.py"
    plugin.write_text(MODELS)
    (tmp_path / "run.yaml").write_text(good.replace("  name: tiny\n  hidden_size: 32\n", ""))
    kernel = Kernel.start(PluginPolicy(allow=(), local=(Path(__file__).parent / "parts.py", plugin)))
    config_ = config.load(tmp_path / "run.yaml", kernel=kernel)
    assert config_.selected("model").component.record.name == "llama"
    (note,) = [note for note in config_.notes if note.startswith("model.name")]
    assert note == "model.name: not given; 'llama' follows from the default"
    assert not [n for n in config.load(config_.to_dict(), kernel=kernel).notes if n.startswith("model.name")]


MODELS = """
from nxdt_core.api import ModelComponent, hookimpl

@hookimpl
def nxdt_models():
    return [ModelComponent(name="llama", target="t:T")]
"""


PATTERN = """
from nxdt_core.api import ModelComponent, hookimpl

@hookimpl
def nxdt_models():
    return [ModelComponent(name="any", target="t:T", hf_architectures=("*ForCausalLM",))]
"""


@pytest.mark.parametrize(("architecture", "name"), [("TinyForCausalLM", "tiny"), ("OtherForCausalLM", "any")])
def test_a_builder_that_names_an_architecture_goes_before_one_with_a_pattern(good, tmp_path, architecture, name):
    (tmp_path / "patterns.py").write_text(PATTERN)
    local = (Path(__file__).parent / "parts.py", tmp_path / "patterns.py")
    (tmp_path / "run.yaml").write_text(good.replace("  name: tiny\n  hidden_size: 32\n", "  model_config: .\n"))
    hf_json(tmp_path, model_type="tiny", architectures=[architecture], hidden_size=32, num_hidden_layers=7)
    resolved = config.load(tmp_path / "run.yaml", kernel=Kernel.start(PluginPolicy(allow=(), local=local)))
    assert names(resolved)["model"] == name
    assert resolved.notes[0] == f"model.name: not given; {name!r} follows from model.model_config ({architecture})"


@pytest.mark.parametrize(
    ("architecture", "name", "dist"),
    [
        ("Gemma2ForCausalLM", "hf", "nxdt-plugin-hf"),
        ("Qwen2ForCausalLM", "qwen2", "nxdt-plugin-llama"),
        ("MixtralForCausalLM", "mixtral", "nxdt-plugin-mixtral"),
        ("MistralForCausalLM", "mistral", "nxdt-plugin-llama"),
    ],
)
def test_an_architecture_that_nobody_reads_is_not_taken_for_a_llama(report, good, tmp_path, architecture, name, dist):
    hf_json(tmp_path, architectures=[architecture])
    (row,) = report(good.replace("  name: tiny\n  hidden_size: 32\n", "  model_config: .\n"))
    assert f"is called {name!r}" in row
    assert dist in row
    assert f"follows from model.model_config ({architecture})" in row


def test_an_unknown_component_hides_no_other_problem_and_makes_none(report, good):
    text = good.replace("name: tiny", "name: tyni").replace("max_steps: 100", "max_steps: -1")
    rows = report(text)
    assert [row.split(": ")[1] for row in rows] == ["trainer.max_steps", "model.name"]


def test_loggers_and_callbacks_are_lists_of_components(load, good):
    resolved = load(good, "exp_manager.loggers=[{name: csv, flush_every: 3}]", "trainer.callbacks=[beep]")
    assert [chosen.component.record.name for chosen in resolved.loggers] == ["csv"]
    assert resolved.loggers[0].config.flush_every == 3
    assert resolved.callbacks[0].config is None
    both = load(good, "exp_manager.loggers=[csv]", "exp_manager.create_tensorboard_logger=true")
    assert [chosen.component.record.name for chosen in both.loggers] == ["csv", "tensorboard"]
    assert load(good, "exp_manager.create_tensorboard_logger=false").loggers == ()


@pytest.mark.parametrize(
    ("override", "row"),
    [
        (
            "exp_manager.loggers=[{name: csv, flush_evry: 3}]",
            "exp_manager.loggers[0].flush_evry: unknown key. Did you mean 'exp_manager.loggers[0].flush_every'?"
            " [NXDT-C010]",
        ),
        (
            "exp_manager.loggers=[{name: csv, flush_every: 0}]",
            "exp_manager.loggers[0].flush_every: found 0 (an integer); allowed: an integer of at least 1. [NXDT-C012]",
        ),
        (
            "exp_manager.loggers=[{flush_every: 3}]",
            "exp_manager.loggers[0].name: required key is missing. Give it the component's name. [NXDT-C011]",
        ),
        (
            "trainer.callbacks=[{name: yes}]",
            "trainer.callbacks[0].name: found true (a boolean); allowed: the component's name, a text. [NXDT-C012]",
        ),
        (
            "trainer.callbacks=[{name: beep, volume: 3}]",
            "trainer.callbacks[0].volume: unknown key. The component takes no keys. [NXDT-C010]",
        ),
    ],
)
def test_options_in_lists_are_checked(report, good, override, row):
    assert report(good, override) == [f"command line: {row}"]


def test_contradicting_logger_keys_are_refused(report, good):
    (row,) = report(good, "exp_manager.loggers=[tensorboard]", "exp_manager.create_tensorboard_logger=false")
    assert row.endswith("names 'tensorboard'. Keep one of the two. [NXDT-C016]")


def test_paths_start_at_the_file_that_names_them(kernel, good, tmp_path, monkeypatch):
    (tmp_path / "conf").mkdir()
    (tmp_path / "elsewhere").mkdir()
    text = good.replace("name: lines", "name: lines\n  files: [a.txt, 'package://nxdt_core/py.typed', /abs/b.txt]")
    (tmp_path / "conf" / "run.yaml").write_text(text)
    monkeypatch.chdir(tmp_path / "elsewhere")
    resolved = config.load("../conf/run.yaml", kernel=kernel)
    files = resolved.selected("dataset").config.files
    import nxdt_core

    assert files[0].resolve() == tmp_path / "conf" / "a.txt"
    assert files[1] == Path(nxdt_core.__file__).parent / "py.typed"
    assert files[2] == Path("/abs/b.txt")
    assert resolved.to_dict()["data"]["files"][1] == "package://nxdt_core/py.typed", "so that it loads elsewhere"
    given = config.load("../conf/run.yaml", ["data.files=[c.txt]"], kernel=kernel)
    assert given.selected("dataset").config.files == (tmp_path / "elsewhere" / "c.txt",)


def hf_json(tmp_path, **values):
    (tmp_path / "config.json").write_text(json.dumps(values))


def test_a_hugging_face_config_fills_what_is_not_given(load, good, tmp_path):
    hf_json(tmp_path, model_type="tiny", hidden_size=64, num_hidden_layers=7)
    text = good.replace("  hidden_size: 32\n", "  model_config: config.json\n")
    model = load(text).selected("model").config
    assert (model.hidden_size, model.num_layers) == (64, 7)
    assert load(text, "model.num_layers=3").selected("model").config.num_layers == 3
    origin = load(text).origins["model.num_layers"]
    assert (origin.kind, origin.where) == ("hf", str(tmp_path / "config.json"))


def test_architectures_of_a_hugging_face_config_select_the_model(load, good, tmp_path):
    hf_json(tmp_path, model_type="tiny", hidden_size=64, num_hidden_layers=7, architectures=["TinyForCausalLM"])
    text = good.replace("  name: tiny\n  hidden_size: 32\n", "  model_config: .\n")
    assert names(load(text))["model"] == "tiny"


@pytest.mark.parametrize(
    ("content", "row"),
    [
        (None, "no file '{path}'. Check the path. [NXDT-C002]"),
        ("[1]", "cannot read '{path}': not a JSON object. Name a YAML file in UTF-8 that you may read. [NXDT-C003]"),
        ('{"model_type": "gpt2"}', "it describes a 'gpt2', not a 'tiny'"),
        ('{"model_type": "tiny"}', "it lacks 'hidden_size'"),
        ("{", "not valid JSON"),
    ],
)
def test_a_hugging_face_config_that_does_not_serve_is_one_row(report, good, tmp_path, content, row):
    path = tmp_path / "hf" / "config.json"
    path.parent.mkdir()
    if content is not None:
        path.write_text(content)
    text = good.replace("  hidden_size: 32\n", "  model_config: hf/config.json\n")
    (found,) = report(text)
    assert found.startswith("run.yaml:10: model.model_config: ")
    assert row.format(path=path) in found


def test_the_author_of_a_model_that_reads_no_hugging_face_config_learns_what_to_add(report, good, tmp_path):
    hf_json(tmp_path, model_type="tiny", hidden_size=64)
    (found,) = report(good.replace("name: tiny\n  hidden_size: 32\n", "name: plain\n  model_config: config.json\n"))
    assert "reads no Hugging Face configuration" in found
    assert "add the class method from_hf(hf) to PlainConfig" in found


def test_a_mistake_of_from_hf_names_the_class_and_not_the_file_alone(report, good, tmp_path):
    hf_json(tmp_path, model_type="tiny", hidden_size=64)
    (found,) = report(good.replace("name: tiny\n  hidden_size: 32\n", "name: faulty\n  model_config: config.json\n"))
    assert f"FaultyConfig.from_hf cannot read '{tmp_path / 'config.json'}': AttributeError: " in found
    assert "If it is right, correct from_hf: model 'faulty' offers the class. [NXDT-C019]" in found


def test_a_saved_configuration_needs_no_hugging_face_file(kernel, load, good, tmp_path):
    hf_json(tmp_path, model_type="tiny", hidden_size=64, num_hidden_layers=7)
    saved = load(good.replace("  hidden_size: 32\n", "  model_config: config.json\n")).to_dict()
    (tmp_path / "config.json").unlink()
    assert config.load(saved, kernel=kernel).selected("model").config.hidden_size == 64
