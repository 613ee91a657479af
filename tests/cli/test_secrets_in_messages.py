"""No message of a command shows a value of the environment: its reference is in the place of the value."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

import click
import pytest

from nxdt_core.cli.app import root
from nxdt_core.cli.verb import LazyCommand
from tests.train.small import SMALL

SECRET, REFERENCE = 's3cr3t-"Pa55\\w0rd-XYZZY', "${oc.env:NXDT_CANARY}"
RECIPE = "recipe:llama-tiny"
DATA = f"data.train_files=['/nope/{REFERENCE}.txt']"
TOKENIZER = f"data.tokenizer={{library: huggingface, model: '/nope/{REFERENCE}'}}"
ACCELERATOR = f"trainer.accelerator={REFERENCE}"
MODEL = f"model.model_config=/nope/{REFERENCE}"
COMMANDS = {
    "train": [("train", RECIPE, *SMALL, DATA), ("train", RECIPE, *SMALL, TOKENIZER), ("train", RECIPE, MODEL)],
    "compile": [("compile", RECIPE, *SMALL, DATA, "model.compile=true")],
    "plan": [("plan", RECIPE, MODEL)],
    "env": [("env", RECIPE, ACCELERATOR), ("env", RECIPE, ACCELERATOR, "--json")],
    "config check": [
        *(("config", "check", RECIPE, key, *form) for key in (MODEL, TOKENIZER) for form in ((), ("--json",))),
        ("config", "check", RECIPE, f"plugins.block=['{REFERENCE}']"),
    ],
    "config show": [("config", "show", RECIPE, MODEL), ("config", "show", RECIPE, DATA, "--json")],
    "data preview": [("data", "preview", RECIPE, key) for key in (DATA, TOKENIZER, MODEL)],
    "plugins trace": [("plugins", "trace", RECIPE, MODEL)],
    "plugins doctor": [
        ("plugins", "doctor", RECIPE, f"plugins.block=['{REFERENCE}']", *form) for form in ((), ("--json",))
    ],
    "checkpoint import": [("checkpoint", "import", ".", "to", "--config", RECIPE, MODEL)],
    "launch hyperpod": [],
    "launch kubernetes": [],
    "launch local": [("launch", "local", RECIPE, MODEL)],
    "launch ray": [],
    "launch slurm": [("launch", "slurm", RECIPE, MODEL), ("launch", "slurm", RECIPE, "--cluster", "cluster.yaml")],
    "sharding": [("sharding", RECIPE, MODEL)],
}
"""Command lines by command, each with an error or a note that has the value. The launchers share one function."""


def commands_with_a_configuration(command: click.Command, words: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield the commands below one that take overrides of a configuration."""
    if isinstance(command, LazyCommand):
        command = command.load()
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from commands_with_a_configuration(found, (*words, name))
    elif any(parameter.name == "overrides" for parameter in command.params):
        yield " ".join(words)


def forms(text: str) -> set[str]:
    return {text, repr(text)[1:-1], json.dumps(text)[1:-1], json.dumps(json.dumps(text)[1:-1])[1:-1]}


def shown_in(*texts: str) -> bool:
    return any(form in text for text in texts for form in (*forms(SECRET), "XYZZY"))


def test_every_command_with_a_configuration_is_tried():
    assert sorted(commands_with_a_configuration(root)) == sorted(COMMANDS)


@pytest.mark.parametrize("words", [words for lines in COMMANDS.values() for words in lines], ids=" ".join)
def test_a_message_has_the_reference_and_not_the_value(nxdt, work, words):
    (work / "cluster.yaml").write_text(f"partition: [{REFERENCE!r}]\n")
    done = nxdt(*words, NXDT_CANARY=SECRET)
    assert REFERENCE in done.stdout + done.stderr
    assert not shown_in(done.stdout, done.stderr)


@pytest.mark.parametrize("words", [("config", "check"), ("data", "preview"), ("train",)], ids=" ".join)
def test_a_message_on_a_terminal_hides_a_value_that_is_wider_than_a_line(nxdt_on_terminal, words):
    _, said = nxdt_on_terminal(*words, RECIPE, TOKENIZER, columns=30, NXDT_CANARY=SECRET)
    assert "NXDT_CANARY" in said.replace("\r\n", "").replace(" ", "")
    assert not shown_in("".join(said.split()))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("${oc.decode:${oc.env:NXDT_CANARY}}", "{XYZZY: ["),
        ("${multiply:${oc.env:NXDT_CANARY},3}", SECRET),
        ("${${oc.env:NXDT_CANARY}}", "XYZZY_key"),
        ("${oc.env:${oc.env:NXDT_CANARY}}", "XYZZY_key"),
    ],
)
def test_an_interpolation_that_fails_does_not_show_what_it_has_read(nxdt, text, value):
    done = nxdt("config", "check", RECIPE, f"trainer.max_steps={text}", NXDT_CANARY=value)
    assert done.returncode == 2
    assert "NXDT-C013" in done.stderr
    assert not shown_in(done.stdout, done.stderr)


EARLY = """
import os
from nxdt_core.api import hookimpl

@hookimpl
def nxdt_validate_config(context):
    raise RuntimeError(f"cannot log in with {os.environ['NXDT_CANARY']!r}")
"""
COMMAND = """
import logging
import click
from nxdt_core.api import CliCommand, hookimpl
from nxdt_core.config import load

@click.command("fails")
@click.argument("overrides", nargs=-1)
def fails(overrides):
    files = load("recipe:llama-tiny", overrides).run.exp_manager.files_to_copy
    logging.getLogger("acme").warning("401 for %s", files)
    raise RuntimeError(f"cannot read {files}")

@hookimpl
def nxdt_cli():
    return [CliCommand(name="fails", target=f"{__name__}:fails", summary="Fail.")]
"""


@pytest.mark.parametrize("devices", [1, 2])
def test_an_error_before_the_log_of_a_run_hides_the_value(nxdt, work, devices):
    (work / "early.py").write_text(EARLY)
    keys = ("plugins.local=[early.py]", f"trainer.devices={devices}", f"exp_manager.files_to_copy=['{REFERENCE}']")
    done = nxdt("train", RECIPE, *SMALL, *keys, NXDT_CANARY=SECRET)
    assert done.returncode == 2
    assert f"cannot log in with '{REFERENCE}'" in done.stderr
    assert done.stderr.count("[NXDT-K007]") == 1
    assert not shown_in(done.stdout, done.stderr)


def test_a_logged_warning_and_the_message_of_a_bug_hide_the_value(nxdt, dist):
    dist("acme", COMMAND)
    done = nxdt("fails", f"exp_manager.files_to_copy=['/nope/{REFERENCE}.txt']", NXDT_CANARY=SECRET)
    assert done.returncode == 1
    assert f"401 for ('/nope/{REFERENCE}.txt',)" in done.stderr
    assert "Traceback" in done.stderr
    assert f"RuntimeError: cannot read ('/nope/{REFERENCE}.txt',)" in done.stderr
    assert not shown_in(done.stdout, done.stderr)


TOKENIZER_OF_BYTES = """
import sys
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
alphabet = pre_tokenizers.ByteLevel.alphabet()
trainer = trainers.BpeTrainer(vocab_size=257, special_tokens=["<end>"], initial_alphabet=alphabet)
tokenizer.train_from_iterator([], trainer)
tokenizer.save(sys.argv[1])
"""


def test_commands_that_read_a_saved_configuration_hide_the_value(nxdt, work):
    place = work / "XYZZY-tokenizer"
    place.mkdir()
    (work / "records.jsonl").write_text('{"text": "a"}\n')
    subprocess.run([sys.executable, "-c", TOKENIZER_OF_BYTES, place / "tokenizer.json"], check=True)
    tokenizer = f"data.tokenizer={{library: huggingface, model: '{work}/{REFERENCE}', eos_token: '<end>'}}"
    keys = ("trainer.max_steps=1", "exp_manager.exp_dir=.", "name=run")
    done = nxdt("train", RECIPE, *SMALL, tokenizer, *keys, NXDT_CANARY=place.name)
    assert done.returncode == 0, done.stderr
    place.rename(work / "elsewhere")
    uri = "run/checkpoints"
    for words in (("generate", uri, "a"), ("evaluate", uri, "records.jsonl"), ("checkpoint", "export", uri, "out")):
        done = nxdt(*words, NXDT_CANARY=place.name)
        assert done.returncode == 2, done.stderr
        assert REFERENCE in done.stderr
        assert not shown_in(done.stdout, done.stderr)
