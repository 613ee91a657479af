"""Exports open in transformers 4 as in transformers 5: models, tokenizers, chat templates, settings of generation."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nxdt_core.checkpoint.format.tensor_index import TensorEntry
from nxdt_core.checkpoint.stores.local import LocalStorage
from nxdt_core.hf.directory import write_hf
from nxdt_core.hf.key_map import sources
from nxdt_core.train import build
from nxdt_core.train.weights.export import plan_export
from nxdt_core.train.weights.saved_config import own_run
from tests.carried import carried
from tests.checkpoint.hf.exchange import llama, write_tokenizer
from tests.checkpoint.hf.transformers_4 import read_here, transformers_4

__all__ = ["transformers_4"]

transformers = pytest.importorskip("transformers", reason="transformers is not installed: nothing to load exports with")

TEXTS = ["hello world", " hello <call> it's", "<s>In the beginning</s>"]
CHAT = [{"role": "user", "content": "hello"}]
TEMPLATE = "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}{{ eos_token }}{% endfor %}"

LOOK = f"""
import json, sys, torch, transformers
opened = {{}}
for directory in sys.argv[1:]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype="auto").eval()
    with torch.no_grad():
        logits = model(torch.arange(40, 72)[None]).logits[0, -1].tolist()
    named = [getattr(tokenizer, name, None) for name in ("bos_token", "eos_token", "pad_token", "image_token")]
    settings = [getattr(model.generation_config, f"{{name}}_token_id") for name in ("bos", "eos", "pad")]
    opened[directory] = {{
        "version": transformers.__version__,
        "logits": logits,
        "special": tokenizer.all_special_tokens,
        "same": [
            [tokenizer(text).input_ids for text in {TEXTS}],
            [*tokenizer("a")],
            named,
            tokenizer.decode(tokenizer("hello world").input_ids),
            tokenizer.apply_chat_template({CHAT}, tokenize=False) if tokenizer.chat_template else None,
            [*settings, model.generation_config.suppress_tokens, str(model.dtype)],
        ],
    }}
print(json.dumps(opened))
"""


def tokenizer_of_5(directory: Path) -> Path:
    """As transformers 5 saves what it has read: a class and keys of its own, and special tokens with names."""
    write_tokenizer(directory)
    read = transformers.AutoTokenizer.from_pretrained(directory)
    read.add_special_tokens({"extra_special_tokens": ["<call>"]})
    read.save_pretrained(directory)
    record = json.loads((directory / "tokenizer_config.json").read_text())
    assert (record["tokenizer_class"], record["extra_special_tokens"]) == ("TokenizersBackend", ["<call>"])
    content = {**record, "image_token": "<call>", "model_specific_special_tokens": {"image_token": "<call>"}}
    (directory / "tokenizer_config.json").write_text(json.dumps(content))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


def tokenizer_of_4(directory: Path) -> Path:
    """As earlier versions saved one: special tokens as objects in a file of their own, templates in a list."""
    write_tokenizer(directory)
    (directory / "chat_template.jinja").unlink()
    special = {key: {"content": "</s>", "lstrip": False} for key in ("eos_token", "unk_token", "pad_token")}
    special |= {"bos_token": {"content": "<s>"}, "additional_special_tokens": [{"content": "</s>"}]}
    (directory / "special_tokens_map.json").write_text(json.dumps(special))
    templates = [{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": "{{ tools }}"}]
    record = {
        "tokenizer_class": "LlamaTokenizer",
        "chat_template": templates,
        "auto_map": {"AutoTokenizer": ["a.B", None]},
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(record))
    return directory


LLAMA_3 = "model.rope_scaling={rope_type: llama3, factor: 4, low_freq_factor: 1, high_freq_factor: 4, " + (
    "original_max_position_embeddings: 16}"
)
YARN = "model.rope_scaling={rope_type: yarn, factor: 4, original_max_position_embeddings: 16}"
MODELS = {
    "llama": (),
    "llama3": (LLAMA_3,),
    "yarn": (YARN,),
    "mistral": ("model.name=mistral", "model.sliding_window=16"),
    "mixtral": ("model.name=mixtral", "model.moe.num_experts=4"),
    "qwen2": ("model.name=qwen2",),
    "qwen3": ("model.name=qwen3", "model.head_dim=16"),
    "gpt": ("model.name=gpt", "model.num_kv_heads=4", "model.make_vocab_size_divisible_by=16"),
}


def write(config, directory: Path, dtype: str | None = None) -> Path:
    """Export a run's model with drawn weights."""
    index = {each.name: TensorEntry(dtype="float32", shape=each.shape) for each in sources(build.model_builder(config))}
    plan, _ = plan_export(own_run(config), SimpleNamespace(facts=SimpleNamespace(hf={})), index, dtype=dtype)
    draw = torch.Generator().manual_seed(0)

    def read(shard):
        return {
            name: (torch.randn(spec.shape, generator=draw) * 0.2).to(getattr(torch, spec.dtype))
            for name, spec in shard.specs.items()
        }

    write_hf(LocalStorage(str(directory)), plan, read, origin="test")
    return directory


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_exports_open_in_both(tmp_path, transformers_4):
    new, old = tokenizer_of_5(tmp_path / "new"), tokenizer_of_4(tmp_path / "old")
    ranks, pieces = (
        carried("llama_models", "llama3", "tokenizer.model"),
        carried("mistral_common", "data/tokenizer.model.v1"),
    )
    first = b"".join(ranks.read_bytes().splitlines(keepends=True)[:400])
    (tmp_path / "ranks.model").write_bytes(first)
    runs = {name: llama(*overrides, tokenizer=new) for name, overrides in MODELS.items()}
    runs["old"] = llama(tokenizer=old)
    runs["tiktoken"] = llama(
        "model.vocab_size=672", f"data.tokenizer={{library: tiktoken, model: {tmp_path / 'ranks.model'}}}"
    )
    runs["sentencepiece"] = llama(
        "model.vocab_size=32000", "model.num_layers=1", f"data.tokenizer={{library: sentencepiece, model: {pieces}}}"
    )
    directories = [str(write(config, tmp_path / "hf" / name)) for name, config in runs.items()]
    directories.append(str(write(runs["llama"], tmp_path / "hf/bfloat16", dtype="bfloat16")))
    earlier, now = transformers_4(LOOK, *directories), read_here(LOOK, *directories)
    for directory in directories:
        four, five = earlier[directory], now[directory]
        assert (four["version"][0], five["version"][0]) == ("4", "5")
        assert four["same"] == five["same"], directory
        assert {*four["special"]} <= {*five["special"]}  # transformers 5 gives each Qwen 2 an unknown token
        torch.testing.assert_close(torch.tensor(four["logits"]), torch.tensor(five["logits"]), rtol=0, atol=1e-6)
        assert four["same"][1] == ["input_ids", "attention_mask"], "models of these kinds take no other inputs"
    assert "<call>" in earlier[directories[0]]["special"]
    assert earlier[directories[0]]["same"][4] == "<s>user: hello</s>"


def test_a_tokenizer_is_written_with_the_keys_of_both(tmp_path):
    """A fast sibling of the test above."""
    tokenizer = build.tokenizer(llama(tokenizer=tokenizer_of_5(tmp_path / "new")))
    files = tokenizer.hf_files()
    record = json.loads(files["tokenizer_config.json"])
    assert record["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert record["additional_special_tokens"] == ["<call>"]
    assert record["extra_special_tokens"] == {"image_token": "<call>"}
    assert record["model_input_names"] == ["input_ids", "attention_mask"]
    assert files["chat_template.jinja"].decode() == TEMPLATE
    old = build.tokenizer(llama(tokenizer=tokenizer_of_4(tmp_path / "old"))).hf_files()
    record = json.loads(old["tokenizer_config.json"])
    assert (record["unk_token"], record["additional_special_tokens"]) == ("</s>", ["</s>"])
    assert not {"chat_template", "auto_map", "extra_special_tokens"} & record.keys()
    assert TEMPLATE in old["chat_template.jinja"].decode()
