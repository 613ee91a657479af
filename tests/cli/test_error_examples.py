"""The examples of ``nxdt explain`` and of the pages of error codes are what a user gets who makes the mistake."""

from __future__ import annotations

import gzip
import re

import pytest

from nxdt_core.cli.app import root
from nxdt_core.cli.explain import error_codes, explanations
from nxdt_core.errors import NxdtError
from nxdt_core.errors.configuration import BadComponentChoice, ConfigError, ConfigProblem
from nxdt_core.kernel import Kernel, PluginPolicy
from nxdt_core.kernel.registry import Registry

RUN = "base: recipe:llama-tiny\ntrainer:\n  max_steps: 100\n"
SECTIONS = (
    "trainer:\n  max_steps: 100\ndata: {global_batch_size: 8, train_dir: corpus}\nmodel: {name: hf, hf_path: m}\n"
)
CHAT = '{{"messages": [{{"role": "user", "content": "Hi"}}, {{"role": "{0}", "content": {1}}}]}}\n'


def check(*words):
    return ("config", "check", *words)


def texts(*words):
    return ("data", "preview", "recipe:llama-tiny", "data.validation_fraction=0", *words)


def chats(*words):
    files = "data.train_files=[chats.jsonl]"
    return ("data", "preview", "recipe:llama-tiny-sft", "data.validation_fraction=0", files, *words)


def train(*words):
    return ("train", "my_run.yaml", *words)


def larger_llama():
    """The weights of the recipe's model with 48 more tokens."""
    import torch
    from safetensors.torch import save

    shapes = {"lm_head.weight": (320, 64), "model.embed_tokens.weight": (320, 64), "model.norm.weight": (64,)}
    for layer in range(4):
        own = {"input_layernorm": (64,), "post_attention_layernorm": (64,)}
        own |= {f"self_attn.{name}_proj": (size, 64) for name, size in (("q", 64), ("k", 32), ("v", 32), ("o", 64))}
        own |= {"mlp.gate_proj": (176, 64), "mlp.up_proj": (176, 64), "mlp.down_proj": (64, 176)}
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in own.items()}
    return save({name: torch.zeros(shape) for name, shape in shapes.items()})


MISTAKES = {
    "NXDT-C002": ({"my_run.yaml": RUN}, check("my_rnu.yaml")),
    "NXDT-C004": ({"my_run.yaml": "trainer:\n  max_steps: [100\nmodel:\n"}, check("my_run.yaml")),
    "NXDT-C005": ({"my_run.yaml": RUN + "  max_steps: 200\n"}, check("my_run.yaml")),
    "NXDT-C006": ({"my_run.yaml": RUN}, check("my_run.yaml", "trainer.max_steps:50")),
    "NXDT-C007": ({}, check("recipe:lama-tiny")),
    "NXDT-C010": ({"my_run.yaml": RUN}, check("my_run.yaml", "model.num_layerz=2")),
    "NXDT-C011": ({"my_run.yaml": SECTIONS}, check("my_run.yaml")),
    "NXDT-C012": ({"my_run.yaml": RUN}, check("my_run.yaml", "trainer.max_steps=many")),
    "NXDT-C013": ({"my_run.yaml": RUN}, check("my_run.yaml", "trainer.max_steps=${trainer.steps}")),
    "NXDT-C016": ({"my_run.yaml": RUN}, check("my_run.yaml", "data.global_batch_size=15")),
    "NXDT-C019": (
        {"my_run.yaml": RUN + "objective: {name: grpo, rewards: [match]}\ndata:\n  name: text\n"},
        check("my_run.yaml"),
    ),
    "NXDT-C040": ({}, ("data", "preview", "recipe:llama2-7b-sft")),
    "NXDT-D001": ({"short.txt": "In the beginning.\n"}, texts("data.train_files=[shrot.txt]")),
    "NXDT-D003": (
        {"corpus.jsonl.gz": gzip.compress(b'{"text": "abc"}\n' * 2000)[:40]},
        texts("data.train_files=[corpus.jsonl.gz]"),
    ),
    "NXDT-D004": ({"latin.txt": "Café in the morning\n".encode("cp1252")}, texts("data.train_files=[latin.txt]")),
    "NXDT-D005": ({"chats.jsonl": CHAT.format("assistant", '"Hello."') + '{"messages": [\n'}, chats()),
    "NXDT-D006": ({"corpus.jsonl": '{"content": "In the beginning"}\n'}, texts("data.train_files=[corpus.jsonl]")),
    "NXDT-D007": ({"short.txt": "In the beginning.\n"}, texts("data.train_files=[short.txt]")),
    "NXDT-D014": ({"my_run.yaml": RUN}, ("data", "preview", "my_run.yaml", "--split", "test")),
    "NXDT-D021": ({"chats.jsonl": CHAT.format("assistant", '"Hello."')}, chats("data.tokenizer.model=my-tokenizer")),
    "NXDT-D300": ({"chats.jsonl": '{"question": "Where?", "reply": "Here."}\n'}, chats()),
    "NXDT-D301": ({"chats.jsonl": CHAT.format("assistant", "7")}, chats()),
    "NXDT-D302": ({"chats.jsonl": CHAT.format("bot", '"Hello."')}, chats()),
    "NXDT-D303": ({"chats.jsonl": CHAT.format("user", '"Hello?"')}, chats()),
    "NXDT-D304": ({"chats.jsonl": CHAT.format("assistant", '""')}, chats()),
    "NXDT-D310": (
        {"chats.jsonl": "".join(CHAT.format("assistant", f'"{"word " * words}"') for words in (900, 1200))},
        chats(),
    ),
    "NXDT-D314": ({"chats.jsonl": CHAT.format("assistant", '"Hello."')}, chats("data.chat_template=chatmll")),
    "NXDT-M050": (
        {"my_run.yaml": RUN, "weights/config.json": '{"vocab_size": 320}', "weights/model.safetensors": larger_llama},
        train("checkpoint.resume_from=weights", "checkpoint.weight_init_only=true"),
    ),
    "NXDT-M051": ({"my_run.yaml": RUN}, train("model.vocab_size=128")),
    "NXDT-P001": ({"my_run.yaml": RUN}, train("trainer.accelerator=gpu")),
    "NXDT-P002": ({"my_run.yaml": RUN}, train("trainer.accelerator=cuda")),
    "NXDT-S011": ({}, ("checkpoint", "verify", "nxdt_experiments/my_run")),
    "NXDT-T006": ({"my_run.yaml": RUN}, train("checkpoint.resume_ignore_no_checkpoint=false")),
}
"""Files of the working directory, and the command that meets the error."""


@pytest.mark.parametrize("code", MISTAKES)
def test_a_mistake_gives_the_example_of_its_code(code, tmp_path, monkeypatch):
    import torch

    if code == "NXDT-P002" and torch.cuda.is_available():
        pytest.skip("this machine has the device that the example lacks")
    files, words = MISTAKES[code]
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        content = content() if callable(content) else content
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NxdtError) as raised:
        root.main(list(words), standalone_mode=False)
    problems = raised.value.problems if isinstance(raised.value, ConfigError) else [raised.value]
    problems = [each.error if isinstance(each, BadComponentChoice) else each for each in problems]
    error = next(each for each in problems if each.code == code)
    row = error_codes()[code][1]
    example = row(**row.example)
    what, do = (text.replace(f"{tmp_path}/", "") for text in (error.what(), error.do()))
    assert what == example.what()
    if code == "NXDT-C007":  # which recipes are close depends on the installed ones
        assert set(re.findall(r"'.*?'", example.do())) <= set(re.findall(r"'.*?'", do))
    else:
        assert do == example.do()
    ((found, _), *_) = explanations([code])[code].examples
    where = [error.place, error.key] if isinstance(error, ConfigProblem) else []
    assert found == ": ".join(filter(None, (*where, what.rstrip("."))))


def test_a_plugin_that_is_not_installed_gives_the_example_of_its_code():
    registry = Registry(kinds=Kernel.start().registry.kinds(), components=[], plugins=[], policy=PluginPolicy())
    with pytest.raises(NxdtError) as raised:
        registry.get("adapter", "lora")
    row = error_codes()["NXDT-K002"][1]
    example = row(**row.example)
    assert (raised.value.what(), raised.value.do()) == (example.what(), example.do())


def test_every_stored_example_is_tried():
    assert {code for code, (_, row) in error_codes().items() if row.example} == {*MISTAKES, "NXDT-K002"}
