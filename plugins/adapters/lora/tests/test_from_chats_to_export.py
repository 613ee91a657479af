"""From a chat set to files that transformers and peft open: what a user types, and the same tokens everywhere."""

from __future__ import annotations

import json

import pytest
import torch

from nxdt_core.cli import main

peft = pytest.importorskip("peft", reason="peft is not installed: nothing to compare with")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: nothing to compare with")
QUESTIONS = ("What is the wifi password?", "How do I clean a wooden table?")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Where the base is tuned on chats, an adapter on top of it, and both are exported."""
    path = tmp_path_factory.mktemp("story")
    kept = {name: path / f"llama-tiny-{name}" / "checkpoints" for name in ("sft", "lora")}
    here = (f"exp_manager.exp_dir={path}", "trainer.accelerator=cpu", "trainer.val_check_interval=null")
    over = (f"checkpoint.resume_from={kept['sft']}", "checkpoint.weight_init_only=true")
    for words in (
        ("train", "recipe:llama-tiny-sft", "trainer.max_steps=40", *here, "trainer.val_check_interval=20"),
        ("train", "recipe:llama-tiny-lora", "trainer.max_steps=10", "model.optim.lr=0.1", *over, *here),
        ("checkpoint", "merge-lora", kept["lora"], path / "merged"),
        ("checkpoint", "export", path / "merged", path / "merged-hf"),
        ("checkpoint", "export", kept["sft"], path / "base-hf"),
        ("checkpoint", "export-lora", kept["lora"], path / "adapter"),
    ):
        assert main([str(word) for word in words]) == 0, words
    return path


@pytest.mark.slow
def test_the_validation_loss_of_the_tiny_recipe_falls(place):
    rows = (place / "llama-tiny-sft" / "validation.jsonl").read_text().splitlines()
    early, late = (json.loads(row)["loss"] for row in rows)
    assert late < early - 0.3


@pytest.mark.slow
def test_transformers_peft_and_nxdt_answer_alike(place, capsys):
    tokenizer = transformers.AutoTokenizer.from_pretrained(place / "merged-hf")
    load = transformers.AutoModelForCausalLM.from_pretrained
    base, merged = load(place / "base-hf"), load(place / "merged-hf")
    tuned = peft.PeftModel.from_pretrained(load(place / "base-hf"), place / "adapter")

    def answer(model, text):
        prompt = torch.tensor([tokenizer(text, add_special_tokens=False).input_ids])
        mask = torch.ones_like(prompt)
        written = model.generate(prompt, attention_mask=mask, max_new_tokens=16, do_sample=False)
        return written[0, prompt.shape[1] :].tolist()

    changed = 0
    for question in QUESTIONS:
        asked = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
        wanted = answer(tuned, text)
        assert wanted == answer(merged, text)
        changed += wanted != answer(base, text)
        capsys.readouterr()
        said = tokenizer.decode(wanted, skip_special_tokens=True)
        for where in (place / "merged", place / "llama-tiny-lora" / "checkpoints"):
            assert main(["generate", str(where), text, "--max-new-tokens", "16"]) == 0
            assert capsys.readouterr().out == f"{text}{said}\n"
            assert main(["generate", str(where), question, "--chat", "--max-new-tokens", "16"]) == 0
            assert capsys.readouterr().out == f"{said}\n"
    assert changed  # or the adapter would be none
