"""Secrets that are written literally: masked where a configuration is shown or written, and refused in addresses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from nxdt_testing.errors import raises

from nxdt_core import config
from nxdt_core.config.show import drop_replaced, hide_secrets, shown_words, without_credentials
from nxdt_core.config.tree import MASK
from nxdt_core.errors.configuration import ConfigError
from nxdt_core.errors.ranks import RanksDisagree
from nxdt_core.launch.agreement import check_agreement
from nxdt_core.run.report import resume_command

CANARY = "canary-4711-value"
BOARD = (
    "{{name: board, token: '{token}', headers: {{X-Key: '{token}'}}, accounts: [{{user: me, password: '{token}'}}]}}"
)
LITERAL = f"exp_manager.loggers=[{BOARD.format(token=CANARY)}]"
REFERENCE = f"exp_manager.loggers=[{BOARD.format(token='${oc.env:NXDT_CANARY}')}]"


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setenv("NXDT_CANARY", CANARY)


def board_of(resolved):
    (logger,) = [found.config for found in resolved.loggers if found.component.record.name == "board"]
    return logger


def test_a_literal_secret_is_used_and_masked(load, good):
    resolved = load(good, LITERAL)
    board = board_of(resolved)
    for secret in (board.token, board.headers["X-Key"], board.accounts[0].password):
        assert secret.get_secret_value() == CANARY
    assert CANARY not in repr(resolved.loggers)
    (shown,) = resolved.to_dict()["exp_manager"]["loggers"]
    assert shown["token"] == shown["headers"]["X-Key"] == shown["accounts"][0]["password"] == MASK
    assert shown["accounts"][0]["user"] == "me"
    assert CANARY not in config.render_show(resolved)
    notes = [note for note in resolved.notes if "secret" in note]
    assert notes[0].startswith("exp_manager.loggers[0].token: the secret is masked in what the run writes")
    assert len(notes) == 3


def test_a_written_mask_says_which_key_to_give_again(kernel, load, good):
    written = yaml.safe_load(config.render_show(load(good, LITERAL)))
    with pytest.raises(ConfigError) as error:
        config.load(written, kernel=kernel)
    rows = [problem.row() for problem in error.value.problems]
    assert any("Give exp_manager.loggers[0].token again, best as ${oc.env:NAME}" in row for row in rows)
    assert {problem.code for problem in error.value.problems} == {"NXDT-C020"}


def test_a_secret_from_the_environment_is_its_reference(kernel, load, good):
    resolved = load(good, REFERENCE)
    assert board_of(resolved).token.get_secret_value() == CANARY
    assert resolved.to_dict()["exp_manager"]["loggers"][0]["token"] == "${oc.env:NXDT_CANARY}"
    assert not [note for note in resolved.notes if "secret" in note]
    assert config.load(yaml.safe_load(config.render_show(resolved)), kernel=kernel) == resolved


def test_options_of_a_logger_that_is_not_selected_are_masked_too(load, good, kernel):
    tree = load(good, "exp_manager.wandb_logger_kwargs={project: x}").to_dict()
    assert tree["exp_manager"]["wandb_logger_kwargs"] == {"project": "x"}


@pytest.mark.parametrize(
    "override",
    [
        f"exp_manager.loggers=[{{name: board, tokn: {CANARY}}}]",
        "exp_manager.loggers=[{name: board, token: [${oc.env:NXDT_CANARY}]}]",
        f"exp_manager.loggers=[{{name: board, token: [{CANARY}, {CANARY}, {CANARY}, {CANARY}]}}]",
        f"exp_manager.loggers=[{{name: board, accounts: [{{user: 3, password: {CANARY}}}]}}]",
        "trainer.max_steps=${oc.env:NXDT_CANARY}",
        "model.dropout=${oc.env:NXDT_CANARY}",
        "data.files=${oc.env:NXDT_CANARY}",
        "checkpoint.storage=${oc.env:NXDT_CANARY}",
        "trainer.max_time=${oc.env:NXDT_CANARY}",
        "model.optim={name: fussy, mode: '${oc.env:NXDT_CANARY}', lr: x}",
    ],
)
def test_errors_do_not_show_values(load, good, override):
    with pytest.raises(ConfigError) as error:
        load(good, override)
    assert CANARY not in str(error.value)


def test_a_variable_where_a_number_is_needed_says_how_to_read_one(report, good):
    (row,) = report(good, "trainer.max_steps=${oc.env:NXDT_CANARY}")
    assert "found '${oc.env:NXDT_CANARY}' (text); allowed: an integer of at least 1." in row
    assert "write ${oc.decode:${oc.env:NXDT_CANARY}}" in row


ADDRESSES = [
    ("s3://AKIAKEY:{}@bucket/x", "s3://********@bucket/x"),
    ("s3://AKIAKEY:pass/{}+x@bucket", "s3://********@bucket"),
    ("s3://{}@bucket", "s3://********@bucket"),
    ("https://user:{}@host:9000/p", "https://********@host:9000/p"),
    ("postgresql+psycopg://u:{}@h/db", "postgresql+psycopg://********@h/db"),
]
KEYS = ["checkpoint.uri", "checkpoint.resume_from", "compiler_cache_url", "exp_manager.exp_dir"]


@pytest.mark.parametrize(("address", "masked"), ADDRESSES)
@pytest.mark.parametrize("key", KEYS)
def test_credentials_in_an_address_are_refused_and_not_repeated(load, good, key, address, masked):
    with pytest.raises(ConfigError) as error:
        load(good, f"{key}={address.format(CANARY)}")
    text = str(error.value)
    assert CANARY not in text
    assert f"{key}: '{masked}' holds credentials. Remove them from the address." in text
    if address.startswith("s3"):
        assert "AWS_ACCESS_KEY_ID" in text


def test_an_option_of_a_component_may_take_an_address_with_credentials_from_a_variable(load, good, monkeypatch):
    monkeypatch.setenv("NXDT_ADDRESS", f"https://user:{CANARY}@host")
    resolved = load(good, "exp_manager.loggers=[{name: board, address: '${oc.env:NXDT_ADDRESS}'}]")
    assert board_of(resolved).address == f"https://user:{CANARY}@host"
    assert CANARY not in config.render_show(resolved)
    with pytest.raises(ConfigError) as error:
        load(good, "checkpoint.uri=${oc.env:NXDT_ADDRESS}")
    assert CANARY not in str(error.value)


@pytest.mark.parametrize(
    "text",
    ["s3://bucket/a@b", "https://host:9000/a@b", "memory://x", "sqlite:///a@b", "file:///a/b@c", "user@host", "a: b@c"],
)
def test_other_addresses_are_left_alone(text):
    assert without_credentials(text) == text


@pytest.mark.parametrize("part", ["a", "a://b:c", "a://b:c ", "://", ":", "a@", "'a://b"])
def test_long_texts_are_searched_in_linear_time(part):
    """A value of 70,000 letters took a minute; the square of these lengths would take hours."""
    text = part * 100_000
    assert without_credentials(f"{text} s3://key:secret@bucket").endswith(" s3://********@bucket")


def test_command_lines_are_written_without_secrets(load, good):
    resolved = load(good, LITERAL, "name=${oc.env:NXDT_CANARY}", "seed=3")
    words = shown_words(resolved, ["nxdt", "train", "run.yaml", *resolved.overrides])
    assert words[3:] == [f"exp_manager.loggers={MASK}", "name=${oc.env:NXDT_CANARY}", "seed=3"]
    assert CANARY not in resume_command(resolved, 5)


def test_an_override_that_a_later_one_replaces_is_not_written(load, good):
    replaced, kept = LITERAL, "exp_manager.loggers=[]"
    resolved = load(good, replaced, "trainer={max_steps: 3}", kept, "trainer={max_steps: 4}")
    words = ["nxdt", "train", *resolved.overrides]
    assert shown_words(resolved, words)[2:] == [f"exp_manager.loggers={MASK}", words[3], kept, words[5]]
    assert drop_replaced(words) == [*words[:2], *words[3:]]


@pytest.mark.parametrize(
    ("user", "kept"),
    [
        ("${oc.env:TOKEN}", True),
        ("me:${oc.env:TOKEN}", True),
        ("me:start-${oc.env:TOKEN}", False),
        ("canary-4711:${oc.env:TOKEN}@canary", False),
        ("${oc.env:USER}:canary-4711", False),
    ],
)
def test_a_reference_in_an_address_stays_as_it_was_typed(user, kept):
    text = f"[{{address: 'https://{user}@host/path'}}]"
    assert without_credentials(text) == (text if kept else f"[{{address: 'https://{MASK}@host/path'}}]")


def test_a_redaction_replaces_values_within_text(load, good):
    load(good, REFERENCE, "checkpoint.uri=memory://b/${oc.env:NXDT_CANARY}")
    assert hide_secrets(f"401 for {CANARY}") == "401 for ${oc.env:NXDT_CANARY}"
    assert hide_secrets("postgres://a:b@c in a traceback") == f"postgres://{MASK}@c in a traceback"


def test_a_redaction_replaces_values_as_python_json_and_paths_spell_them(load, good, monkeypatch):
    value = 'a "quoted" \\ value/'
    monkeypatch.setenv("NXDT_CANARY", value)
    load(good, "checkpoint.uri=memory://b/${oc.env:NXDT_CANARY}")
    for text in (value, repr(value), json.dumps(value), str(Path("/data") / value)):
        assert "quoted" not in hide_secrets(text), text


def test_a_configuration_that_is_read_is_hidden_from_then_on_and_a_default_is_not(load, good):
    load(good, REFERENCE, "name=${oc.env:NXDT_UNSET,an-ordinary-word}")
    assert hide_secrets(f"401 for {CANARY}: an-ordinary-word") == "401 for ${oc.env:NXDT_CANARY}: an-ordinary-word"
    load(good, LITERAL.replace(CANARY, "literal-0815"))
    assert hide_secrets("401 for literal-0815") == f"401 for {MASK}"


class TwoRanks:
    """A rank whose partner sent ``theirs``."""

    world_size, host = 2, "node"

    def __init__(self, theirs=()):
        self.theirs, self.sent = iter(theirs), []

    def broadcast_object(self, value):
        """The salt of the first rank."""
        return "salt"

    def all_gather_object(self, value):
        """What both sent."""
        self.sent.append(value)
        return [value, next(self.theirs, value if isinstance(value, str) else ("other", {}))]


def test_ranks_with_different_secrets_are_told_without_them(load, good, monkeypatch):
    key = "name=${oc.env:NXDT_CANARY}"
    facts = []
    for value in (CANARY, f"{CANARY}-2"):
        monkeypatch.setenv("NXDT_CANARY", value)
        with raises(RanksDisagree):
            check_agreement(load(good, key), other := TwoRanks(["another digest"]))
        facts.append(other.sent)
        check_agreement(load(good, key), TwoRanks())
    assert facts[0][0] != facts[1][0]
    with raises(RanksDisagree) as error:
        check_agreement(load(good, key), TwoRanks(facts[0]))
    assert CANARY not in str(error.value)
    assert 'name is "${oc.env:NXDT_CANARY}" (value ' in str(error.value)


@pytest.mark.parametrize(
    "text",
    [
        "no file 'https:/me:canary-4711@host/x.yaml'.",
        "s3:/key:canary-4711@bucket/run holds nothing",
        "two: a://canary-4711@b, c:/canary-4711@d",
    ],
)
def test_messages_mask_an_address_that_was_taken_for_a_path(text):
    assert "canary" not in without_credentials(text)
    assert f"://{MASK}@" in without_credentials(text)


def test_messages_keep_paths_with_an_at_sign():
    text = "C001: /home/me@work/x.yaml:3: no file './a@b', user@host:/x"
    assert without_credentials(text) == text


def test_an_override_that_is_no_yaml_is_named_without_its_value(report, good):
    (row,) = report(good, f"exp_manager.loggers=[{{name: board, token: {CANARY}")
    assert "'exp_manager.loggers=…' sets no key: the value is not valid YAML" in row
    assert CANARY not in row
