"""What a Hugging Face directory says of using its model is in the export again: stop tokens and generation settings."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from nxdt_core.checkpoint.format.hf_source import HFSource, json_bytes, read_hf_source
from nxdt_core.cli import main
from nxdt_core.errors.models import HFFileDamaged
from nxdt_core.hf.directory import hf_settings
from nxdt_core.train.generate import load_model
from nxdt_core.train.weights.export import export_hf
from nxdt_core.train.weights.importing import import_checkpoint
from tests.checkpoint.hf.exchange import TEXT, newest, write_tokenizer
from tests.checkpoint.hf.test_import import write_model
from tests.sampling import slow, slow_except

transformers = pytest.importorskip("transformers", reason="transformers is not installed: nothing to import")

STOPS = [1, 42, 299]
GENERATION = {
    "bos_token_id": 0,
    "eos_token_id": STOPS,
    "pad_token_id": 42,
    "do_sample": True,
    "temperature": 0.6,
    "top_p": 0.9,
    "max_new_tokens": 77,
    "suppress_tokens": [17],
    "transformers_version": "4.43.0",
}


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with several stop tokens, generation settings and files that are no part of a model."""
    directory = tmp_path_factory.mktemp("chat") / "model"
    write_model(directory)
    config = json.loads((directory / "config.json").read_text())
    config |= {
        "eos_token_id": STOPS,
        "pretraining_tp": 2,
        "use_cache": False,
        "_name_or_path": "x",
        "auto_map": {"A": "b.C"},
    }
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "generation_config.json").write_text(json.dumps(GENERATION))
    for name in ("LICENSE", "README.md", "preprocessor_config.json"):
        (directory / name).write_text("{}")
    return directory


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The override that names a short text: all of the recipe's is tokenised for as long as the rest of a run takes."""
    file = tmp_path_factory.mktemp("corpus") / "short.txt"
    file.write_text("".join(TEXT.read_text().splitlines(keepends=True)[:500]))
    return f"data.train_files=[{file}]"


def without_tokenizer(chat: Path, directory: Path) -> Path:
    shutil.copytree(chat, directory)
    for path in (*directory.glob("tokenizer*"), directory / "chat_template.jinja"):
        path.unlink()
    return directory


def said(directory: Path) -> tuple[dict[str, object], dict[str, object]]:
    """Contents of the two files."""
    return tuple(json.loads((directory / f"{name}.json").read_text()) for name in ("config", "generation_config"))


def check(directory: Path, padding: list[int]) -> None:
    config, generation = said(directory)
    assert (config["eos_token_id"], config["bos_token_id"]) == (STOPS, 0)
    assert (config["pretraining_tp"], config["use_cache"]) == (2, False)
    assert not {"auto_map", "_name_or_path"} & config.keys()
    expected = {**GENERATION, "suppress_tokens": [17, *padding]}
    del expected["transformers_version"]
    assert generation == expected
    theirs = transformers.GenerationConfig.from_pretrained(directory)
    assert (theirs.eos_token_id, theirs.temperature, theirs.top_p, theirs.do_sample) == (STOPS, 0.6, 0.9, True)


def test_stop_tokens_and_generation_settings_come_back(tmp_path, chat):
    uri = str(tmp_path / "store")
    imported = import_checkpoint(str(chat), uri)
    assert imported.notes == ("not in the checkpoint: 'LICENSE', 'README.md', 'preprocessor_config.json'",)
    exported = export_hf(uri, str(tmp_path / "out"))
    check(tmp_path / "out", [300, 301, 302, 303])
    assert "'auto_map'" in exported.notes[0]
    assert exported.notes[1] == f"not copied from '{chat}': 'LICENSE', 'README.md', 'preprocessor_config.json'"


def test_they_come_back_without_a_tokenizer(tmp_path, chat):
    source, uri = without_tokenizer(chat, tmp_path / "in"), str(tmp_path / "store")
    import_checkpoint(str(source), uri)
    exported = export_hf(uri, str(tmp_path / "out"))
    assert exported.notes[0] == "no tokenizer is included: the run names none"
    check(tmp_path / "out", [])


def test_a_generation_ends_at_each_stop_token(tmp_path, chat):
    uri = str(tmp_path / "store")
    import_checkpoint(str(chat), uri)
    assert set(load_model(uri).stop_ids) == set(STOPS)


@pytest.mark.parametrize("begin", [slow("directory"), "checkpoint"])
def test_a_run_that_begins_with_them_keeps_them(tmp_path, chat, corpus, monkeypatch, begin):
    monkeypatch.chdir(tmp_path)
    source = str(chat)
    if begin == "checkpoint":
        source = str(tmp_path / "store")
        import_checkpoint(str(chat), source)
    words = (
        *("train", "recipe:hf-tiny", "name=run", "model.name=null", f"model.model_config={chat}"),
        *(f"checkpoint.resume_from={source}", "checkpoint.weight_init_only=true", "trainer.val_check_interval=null"),
        *("data.tokenizer.library=huggingface", f"data.tokenizer.model={chat}", corpus),
        *("data.seq_length=32", "data.global_batch_size=8", "trainer.max_steps=1"),
    )
    assert main([*words]) == 0
    assert main([*words[:-1], "trainer.max_steps=2", "checkpoint.resume_if_exists=true"]) == 0
    store = "nxdt_experiments/run/checkpoints"
    assert newest(store).step == 2
    export_hf(store, "out")
    check(tmp_path / "out", [300, 301, 302, 303])


def test_a_merged_adapter_keeps_those_of_its_base(tmp_path, chat, corpus, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = (
        *("train", "recipe:hf-tiny", "name=run", "model.name=null", f"model.model_config={chat}", "adapter.name=lora"),
        *(f"checkpoint.resume_from={chat}", "checkpoint.weight_init_only=true", "trainer.val_check_interval=null"),
        *("data.tokenizer.library=huggingface", f"data.tokenizer.model={chat}", corpus),
        *(
            "data.seq_length=32",
            "data.global_batch_size=8",
            "trainer.max_steps=1",
            "adapter.target_modules=[all-linear]",
        ),
    )
    assert main([*words]) == 0
    assert main(["checkpoint", "merge-lora", "nxdt_experiments/run/checkpoints", "merged"]) == 0
    assert main(["checkpoint", "export", "merged", "out"]) == 0
    check(tmp_path / "out", [300, 301, 302, 303])
    assert set(load_model("nxdt_experiments/run/checkpoints").stop_ids) == set(STOPS)


FAMILIES = {
    "llama": {},
    "mistral": {"sliding_window": 16},
    "mixtral": {"num_local_experts": 4, "output_router_logits": True},
    "gpt2": {"n_inner": 48, "summary_type": "mean"},
    "gpt_neox": {"rotary_pct": 0.5, "num_key_value_heads": None},
    "qwen2": {"max_window_layers": 5},
    "qwen3": {"head_dim": 8, "attention_bias": True},
    "gemma2": {"head_dim": 8, "sliding_window": 16},
    "qwen3_moe": {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
}


@pytest.mark.parametrize("family", slow_except([*FAMILIES], {*FAMILIES} - {"qwen2", "qwen3_moe"}))
def test_transformers_reads_the_same_configuration_again(tmp_path, family):
    """Qwen3-MoE and Gemma 2 are both of the plugin ``hf``, which keeps a configuration as it is."""
    keys = {
        **{"vocab_size": 304, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
        **({"intermediate_size": 48, "num_key_value_heads": 2} if family != "gpt2" else {}),
        **{"max_position_embeddings": 64, "eos_token_id": [1, 2], "bos_token_id": 0, "pad_token_id": 3},
        **FAMILIES[family],
    }
    before = transformers.AutoConfig.for_model(family, **keys)
    transformers.AutoModelForCausalLM.from_config(before).save_pretrained(tmp_path / "in")
    import_checkpoint(str(tmp_path / "in"), str(tmp_path / "store"))
    exported = export_hf(str(tmp_path / "store"), str(tmp_path / "out"))
    assert exported.notes == ("no tokenizer is included: the run names none",)
    theirs, again = (transformers.AutoConfig.from_pretrained(tmp_path / name).to_dict() for name in ("in", "out"))
    differs = {key for key in theirs.keys() | again.keys() if theirs.get(key) != again.get(key)} - {"_name_or_path"}
    # What hidden_size and the number of heads say, and what GPT-NeoX says under other names, too.
    assert differs <= {"head_dim", "rope_theta", "partial_rotary_factor"}


def test_ids_that_mean_something_else_to_the_run_are_not_kept(tmp_path, chat):
    other = write_tokenizer(tmp_path / "other")
    content = json.loads((other / "tokenizer.json").read_text())
    content["added_tokens"][1]["content"] = "<end>"
    content["model"]["vocab"] = {
        "<end>" if text == "</s>" else text: i for text, i in content["model"]["vocab"].items()
    }
    (other / "tokenizer.json").write_text(json.dumps(content))
    (other / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    uri = str(tmp_path / "store")
    import_checkpoint(str(chat), uri, overrides=[f"data.tokenizer.model={other}"])
    exported = export_hf(uri, str(tmp_path / "out"))
    config, generation = said(tmp_path / "out")
    assert (config["eos_token_id"], generation["eos_token_id"]) == (1, 1)
    assert (generation["temperature"], generation["max_new_tokens"]) == (0.6, 77)
    assert 17 not in generation["suppress_tokens"]
    assert "gives them to other tokens" in exported.notes[0]
    assert load_model(uri).stop_ids == (1,)


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("found", ["</s>", [1, "2"], True, {"a": 1}])
def test_a_token_that_is_no_id_is_named(tmp_path, chat, file, found):
    source = tmp_path / "in"
    shutil.copytree(chat, source)
    (source / file).write_text(json.dumps({**json.loads((source / file).read_text()), "eos_token_id": found}))
    with pytest.raises(HFFileDamaged, match=rf"{file}' cannot be read: eos_token_id must be a token id"):
        read_hf_source(source)


def test_what_is_kept_survives_as_facts(chat):
    source = read_hf_source(chat)
    assert HFSource.of_facts(json.loads(json.dumps(source.facts()))) == source
    assert source.tokens == {"0": "<s>", "1": "</s>"}
    assert HFSource.of_facts({}) is None


LINEAR = {"rope_type": "linear", "factor": 8.0}
LONG = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}


@pytest.mark.parametrize(
    ("now", "older"),
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, {"rope_theta": 5e5}),
        (
            {"rope_parameters": {**LINEAR, "rope_theta": 5e5, "partial_rotary_factor": 0.5}},
            {"rope_theta": 5e5, "partial_rotary_factor": 0.5, "rope_scaling": LINEAR},
        ),
        (
            {
                "rope_parameters": {
                    "full_attention": {**LINEAR, "rope_theta": 1e6},
                    "sliding_attention": {"rope_theta": 1e4},
                }
            },
            {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": LINEAR},
        ),
        (
            {"original_max_position_embeddings": 9, "rope_parameters": {**LONG, "original_max_position_embeddings": 9}},
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}},
        ),
        ({"rope_theta": 7.0, "rope_parameters": {"rope_theta": 7.0}}, {"rope_theta": 7.0}),
        ({"rope_parameters": None}, {}),
        ({}, {}),
    ],
)
def test_what_transformers_4_looks_for_is_there_too(now, older):
    written = hf_settings(now, None, (), None)[0]["config.json"]
    assert {key: value for key, value in written.items() if not key.endswith("_token_id")} == {**now, **older}


def test_infinities_are_spelled_as_transformers_spells_them():
    content = {"limit": [0.0, float("inf")], "low": float("-inf"), "none": float("nan")}
    spelled = json.loads(json_bytes(content), parse_constant=pytest.fail)
    assert spelled == {
        "limit": [0.0, {"__float__": "Infinity"}],
        "low": {"__float__": "-Infinity"},
        "none": {"__float__": "NaN"},
    }
