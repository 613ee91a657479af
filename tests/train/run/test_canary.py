"""A canary in the environment and in secret fields: no file of a run and no output holds it."""

from __future__ import annotations

import base64
import hashlib
import json
import sys
from pathlib import Path

import pytest
import yaml
from nxdt_testing.errors import raises

from nxdt_core import checkpoint
from nxdt_core.cli import main
from nxdt_core.config import load
from nxdt_core.errors.checkpoints import SavedConfigUnusable
from nxdt_core.run import train
from nxdt_core.train import build
from nxdt_core.train.weights.saved_config import named_config, saved_run
from tests.train.small import SMALL

CANARY = "canary-4711-value"
"""Given by a reference."""
PASSWORD = "finch-0815-password"
"""Given literally in a secret field."""
FORMS = tuple(form for text in (CANARY.encode(), PASSWORD.encode()) for form in (text, base64.b64encode(text)[:-4]))
PARTS = Path(__file__).parent / "canary_parts.py"
REFERENCE = "${oc.env:NXDT_CANARY}"


@pytest.fixture
def nxdt(tmp_path, capfd, monkeypatch):
    """Run ``nxdt`` in this process; returns status and all that it printed."""
    monkeypatch.setenv("NXDT_CANARY", CANARY)
    monkeypatch.chdir(tmp_path)

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["nxdt", *words])
        said = ""
        try:
            status = main(list(words))
        except RuntimeError as error:  # a bug, whose traceback Python prints
            status, said = 1, str(error)
        return status, "".join([*capfd.readouterr(), said])

    return run


def overrides(tmp_path, *, name="run", fail_at=0):
    """A run of two steps with the canary in a reference and in a longer text, and a password in a secret field."""
    board = f"{{name: board, token: '{REFERENCE}', address: 'https://user:{REFERENCE}@host'}}"
    return [
        *SMALL,
        f"name={name}",
        "trainer.max_steps=2",
        f"exp_manager.exp_dir={tmp_path}",
        f"plugins.local=['{PARTS}']",
        f"exp_manager.loggers=[tensorboard, {board}]",
        f"trainer.callbacks=[{{name: fail, password: {PASSWORD}, at_step: {fail_at}}}]",
    ]


def holding_the_canary(directory):
    """Files below it with the canary, plain or in base64."""
    files = [path for path in sorted(directory.rglob("*")) if path.is_file()]
    return [path for path in files if any(form in path.read_bytes() for form in FORMS)]


def test_no_file_and_no_output_holds_the_canary(nxdt, tmp_path):
    keys = overrides(tmp_path)
    uri = str(tmp_path / "run" / "checkpoints")
    outputs = {}
    for words in (
        ["config", "check", "recipe:llama-tiny", *keys],
        ["config", "show", "recipe:llama-tiny", *keys],
        ["config", "show", "--json", "recipe:llama-tiny", *keys],
        ["plan", "recipe:llama-tiny", *keys],
        ["plan", "--json", "recipe:llama-tiny", *keys],
        ["train", "recipe:llama-tiny", *keys],
        ["checkpoint", "list", "--json", uri],
        ["checkpoint", "inspect", "--json", uri],
        ["checkpoint", "inspect", "--saved-config", uri],
        ["checkpoint", "inspect", "--saved-config", "--json", uri],
    ):
        status, outputs[" ".join(words[:3])] = nxdt(*words)
        assert status == 0, outputs
    status, outputs["failure"] = nxdt("train", "recipe:llama-tiny", *overrides(tmp_path, name="bad", fail_at=1))
    assert status != 0
    assert "401: cannot log in with ********" in outputs["failure"]
    assert "401: cannot log in with ********" in (tmp_path / "bad" / "logs" / "errors.txt").read_text()

    used = (tmp_path / "run" / "used.txt").read_text()
    given = [CANARY, f"https://user:{CANARY}@host"]
    assert used == hashlib.sha256(repr(given).encode()).hexdigest(), "the canary was not used"
    assert [name for name, text in outputs.items() if CANARY in text or PASSWORD in text] == []
    assert holding_the_canary(tmp_path) == []
    assert REFERENCE in (tmp_path / "run" / "config.yaml").read_text()
    assert "password: '********'" in (tmp_path / "run" / "config.yaml").read_text().replace('"', "'")
    assert "trainer.callbacks=********" in (tmp_path / "run" / "cmd-args.log").read_text().replace("'", "")
    assert len(list((tmp_path / "run").rglob("events.out.*"))) == 1
    kept = json.loads((tmp_path / "run" / "of_callbacks.json").read_text())
    assert kept["exp_manager"]["loggers"][1]["token"] == REFERENCE
    assert kept["trainer"]["callbacks"][0]["password"] == "********"


def test_a_plugin_validates_values_and_what_it_quotes_is_the_reference(nxdt, tmp_path, monkeypatch):
    monkeypatch.setenv("NXDT_CANARY", f"refused-{CANARY}")
    status, said = nxdt("config", "check", "recipe:llama-tiny", *overrides(tmp_path))
    assert status == 2
    assert f"{REFERENCE} is on a list" in said
    assert CANARY not in said


@pytest.mark.parametrize(
    "words",
    [
        ("config", "check", "{address}.yaml"),
        ("checkpoint", "import", "{address}", "here"),
        ("checkpoint", "verify", "--trusted", "{address}", "here"),
        ("checkpoint", "list", "gs://" + "{user}/x"),
        ("checkpoint", "list", "file://" + "{user}/x"),
        ("generate", "{address}", "In"),
    ],
    ids=" ".join,
)
def test_a_command_does_not_print_the_password_of_an_address(nxdt, words):
    user = f"me:{PASSWORD}@host"
    status, said = nxdt(*(word.format(address=f"s3://{user}/x", user=user) for word in words))
    assert status == 2
    assert PASSWORD not in said
    assert "NXDT-" in said


def test_the_search_finds_a_canary(tmp_path):
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "file").write_bytes(b"\x00" + FORMS[0])
    (tmp_path / "other").write_bytes(FORMS[3])
    assert len(holding_the_canary(tmp_path)) == 2


def test_a_run_resumes_from_its_written_configuration_once_its_secrets_are_given(nxdt, tmp_path, monkeypatch):
    assert nxdt("train", "recipe:llama-tiny", *overrides(tmp_path))[0] == 0
    again = ["train", str(tmp_path / "run" / "config.yaml"), "trainer.max_steps=3", "checkpoint.resume_if_exists=true"]
    status, said = nxdt(*again)
    assert status == 2
    assert "Give trainer.callbacks[0].password again, best as ${oc.env:NAME}" in said
    given = f"trainer.callbacks=[{{name: fail, password: '{REFERENCE}'}}]"
    monkeypatch.delenv("NXDT_CANARY")
    status, said = nxdt(*again, given)
    assert status == 2
    assert "exp_manager.loggers[1].token: cannot resolve '${oc.env:NXDT_CANARY}'" in said
    assert "Environment variable 'NXDT_CANARY' not found" in said
    monkeypatch.setenv("NXDT_CANARY", CANARY)
    status, said = nxdt(*again, given)
    assert status == 0, said
    assert checkpoint.latest(build.storage(load(str(tmp_path / "run" / "config.yaml"), [given])), warn=print).step == 3
    more = ("trainer.max_steps=4", "checkpoint.resume_if_exists=true")
    status, said = nxdt("train", "recipe:llama-tiny", *overrides(tmp_path), *more)
    assert status == 0, said
    assert "resuming from" in said
    assert holding_the_canary(tmp_path) == []


def test_a_run_resumes_from_the_users_own_file_without_giving_secrets_again(nxdt, tmp_path):
    keys = overrides(tmp_path)
    assert nxdt("train", "recipe:llama-tiny", *keys)[0] == 0
    status, said = nxdt("train", "recipe:llama-tiny", *keys, "trainer.max_steps=3", "checkpoint.resume_if_exists=true")
    assert status == 0, said
    assert (tmp_path / "run" / "checkpoints" / "step-00000003").is_dir()
    assert holding_the_canary(tmp_path) == []


HOOKS = """
import json
from pathlib import Path

from nxdt_core.api import hookimpl


def keep(name, config):
    (Path(__file__).parent / f"{name}.json").write_text(json.dumps(config))


@hookimpl
def nxdt_config_defaults(context):
    keep("defaults", context.config)


@hookimpl
def nxdt_validate_config(context):
    keep("validate", context.config)
    return []
"""


def test_callbacks_receive_what_is_written_and_hooks_before_the_run_what_is_used(nxdt, tmp_path):
    (tmp_path / "hooks").mkdir()
    (tmp_path / "hooks" / "watching.py").write_text(HOOKS)
    keys = [*overrides(tmp_path), f"plugins.local=['{PARTS}', '{tmp_path}/hooks/watching.py']"]
    status, said = nxdt("train", "recipe:llama-tiny", *keys)
    assert status == 0, said
    seen = {path.stem: json.loads(path.read_text()) for path in (tmp_path / "hooks").glob("*.json")}
    written = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert seen.keys() == {"defaults", "validate"}
    assert json.loads((tmp_path / "run" / "of_callbacks.json").read_text()) == written
    for name, token in (("defaults", REFERENCE), ("validate", CANARY)):
        assert seen[name]["exp_manager"]["loggers"][1]["token"] == token
        assert seen[name]["trainer"]["callbacks"][0]["password"] == PASSWORD


def test_a_checkpoint_is_used_without_variables_and_by_a_named_configuration_with_them(small_run, monkeypatch):
    monkeypatch.setenv("NXDT_HIDDEN", "32")
    monkeypatch.setenv("NXDT_NAME", "canary-name")
    config = small_run(
        "trainer.max_steps=1",
        "model.hidden_size=${oc.decode:${oc.env:NXDT_HIDDEN}}",
        "exp_manager.wandb_logger_kwargs={project: '${oc.env:NXDT_NAME}'}",
    )
    train(config)
    manifest = checkpoint.latest(build.storage(config), warn=print)
    assert manifest.facts.config["model"]["hidden_size"] == "${oc.decode:${oc.env:NXDT_HIDDEN}}"
    with raises(SavedConfigUnusable, match=r"model\.hidden_size: it is the reference .*NXDT_HIDDEN.*") as caught:
        saved_run(manifest, where="here")
    assert "--config" in str(caught.value)
    assert "NXDT_NAME" not in str(caught.value), "loggers are not needed"
    named, _ = named_config(str(config.run_dir / "config.yaml"))
    assert saved_run(manifest, where="here", config=named).config.selected("model").config.hidden_size == 32
