"""Answers end where the template ends a turn, whatever the tokenizer calls its end of text."""

from __future__ import annotations

import json
import shutil
from importlib.resources import files
from pathlib import Path

import pytest
import torch

from nxdt_core.cli import main
from nxdt_core.data.chat.rendering import stop_ids
from nxdt_core.data.chat.templates import ChatKeys, template_names
from nxdt_core.data.tokenizers.byte import ByteTokenizer
from nxdt_core.data.tokenizers.config import HuggingFaceTokenizerConfig
from nxdt_core.data.tokenizers.huggingface import HuggingFaceTokenizer
from tests.sampling import slow

transformers = pytest.importorskip("transformers", reason="transformers is not installed: nothing to compare with")
SHIPPED = Path(str(files("nxdt_plugin_sft_chat"))) / "data/tokenizer"
TALK = [{"role": "user", "content": "Is it?"}, {"role": "assistant", "content": "Yes, it is."}]


@pytest.mark.parametrize("name", [None, *template_names()])
def test_what_ends_a_turn_is_found_in_each_template(name, tmp_path):
    path = Path(shutil.copytree(SHIPPED, tmp_path / "tokenizer"))
    tokens = {"llama3": "<|eot_id|>", "gemma": "<end_of_turn>"}
    record = json.loads((path / "tokenizer.json").read_text())
    added = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    for number, token in enumerate(tokens.values(), start=1024):
        record["added_tokens"].append({"id": number, "content": token, "special": True, **added})
    (path / "tokenizer.json").write_text(json.dumps(record))
    named = HuggingFaceTokenizerConfig(model=path, bos_token="<|endoftext|>", eos_token="<|pad|>")
    tokenizer = HuggingFaceTokenizer(named)
    end = tokens.get(name, "<|im_end|>" if name in (None, "chatml") else "<|pad|>")
    (wanted,) = tokenizer.locate([end])[0].ids.tolist()
    assert stop_ids(ChatKeys(chat_template=name), tokenizer) == tuple(dict.fromkeys([tokenizer.eos_id, wanted]))


def test_without_a_template_the_end_of_text_is_all():
    assert stop_ids(ChatKeys(chat_template="chatml"), ByteTokenizer()) == (ByteTokenizer().eos_id,)


def test_an_ordinary_token_of_the_vocabulary_may_end_a_turn(tmp_path):
    path = Path(shutil.copytree(SHIPPED, tmp_path / "tokenizer"))
    record = json.loads((path / "tokenizer.json").read_text())
    ordinary = {**record["added_tokens"][0], "id": 1024, "content": "<end>", "special": False}
    (path / "tokenizer.json").write_text(json.dumps({**record, "added_tokens": [*record["added_tokens"], ordinary]}))
    tokenizer = HuggingFaceTokenizer(HuggingFaceTokenizerConfig(model=path))
    keys = ChatKeys(chat_template="{% for m in messages %}{{ m.content }} <end>\n{% endfor %}")
    assert stop_ids(keys, tokenizer) == (tokenizer.eos_id, 1024)


@pytest.mark.parametrize("eos", [slow("<|im_end|>"), "<|endoftext|>"])
def test_answers_end_with_the_turn(eos, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("talk.jsonl").write_text(f"{json.dumps({'messages': TALK})}\n" * 4)
    data = ("data.train_files=[talk.jsonl]", "data.packing=false", "data.seq_length=48", "data.global_batch_size=1")
    more = ("data.validation_fraction=0", "trainer.val_check_interval=null", f"data.tokenizer.eos_token='{eos}'")
    learns = ("trainer.max_steps=60", "model.optim.lr=1e-2", "model.num_layers=2")
    assert main(["train", "recipe:llama-tiny-sft", "name=run", *data, *more, *learns]) == 0
    kept = "nxdt_experiments/run/checkpoints"
    capsys.readouterr()
    assert main(["evaluate", kept, "talk.jsonl", "--json", "--max-new-tokens", "24"]) == 0
    assert json.loads(capsys.readouterr().out)["exact_match"] == 1.0
    assert main(["generate", kept, TALK[0]["content"], "--chat"]) == 0
    assert capsys.readouterr().out == f"{TALK[1]['content']}\n"
    assert main(["checkpoint", "export", kept, "out"]) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained("out")
    tokenizer = transformers.AutoTokenizer.from_pretrained("out")
    asked = tokenizer.apply_chat_template(TALK[:1], add_generation_prompt=True, return_dict=False)
    prompt = torch.tensor([asked])
    written = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=24, do_sample=False)
    assert tokenizer.decode(written[0, len(asked) :]) == f"{TALK[1]['content']}<|im_end|>"
