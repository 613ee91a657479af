"""A template that the run names is that of its answers, and goes with the exported tokenizer."""

from __future__ import annotations

import json
import shutil
from importlib.resources import files
from pathlib import Path

import pytest

from nxdt_core.cli import main
from nxdt_core.data.chat.templates import shipped_template
from tests.sampling import slow

transformers = pytest.importorskip("transformers", reason="transformers is not installed: nothing to compare with")
TALK = [{"role": "user", "content": "Which?"}, {"role": "assistant", "content": "This."}]


@pytest.mark.parametrize("own", [slow(False), True], ids=["without-a-template", "with-another"])
def test_answers_and_the_export_have_the_named_template(own, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    without = shutil.ignore_patterns("*.jinja")
    shutil.copytree(
        Path(str(files("nxdt_plugin_sft_chat"))) / "data/tokenizer", "tokenizer", ignore=None if own else without
    )
    Path("talk.jsonl").write_text(f"{json.dumps({'messages': TALK})}\n" * 4)
    words = ("trainer.max_steps=2", "data.chat_template=zephyr", "data.tokenizer.model=tokenizer", "data.packing=false")
    more = ("data.train_files=[talk.jsonl]", "data.validation_fraction=0", "trainer.val_check_interval=null")
    assert main(["train", "recipe:llama-tiny-sft", "name=run", "data.global_batch_size=2", *words, *more]) == 0
    kept = "nxdt_experiments/run/checkpoints"
    assert main(["checkpoint", "export", kept, "out"]) == 0
    loaded = transformers.AutoTokenizer.from_pretrained("out")
    text = loaded.apply_chat_template(TALK[:1], add_generation_prompt=True, tokenize=False)
    wanted = loaded.apply_chat_template(
        TALK[:1], chat_template=shipped_template("zephyr").text, add_generation_prompt=True, tokenize=False
    )
    assert text == wanted
    assert "<|user|>" in text
    said = []
    for words in ((text,), (TALK[0]["content"], "--chat")):
        capsys.readouterr()
        assert main(["generate", kept, *words, "--max-new-tokens", "5"]) == 0
        said.append(capsys.readouterr().out.removeprefix(text))
    assert said[0] == said[1]
    assert main(["evaluate", kept, "talk.jsonl"]) == 0
