"""What ``--json`` prints has the keys of the documentation, in their order."""

import json
import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs/reference/terminal.md").read_text()
SHAPES = {
    command: (kind, re.findall(r"`(\w+)`", keys))
    for command, kind, keys in re.findall(r"^\| (`.*?) \| (object|list) \| (.*) \|$", PAGE, flags=re.MULTILINE)
}
SMALL = (
    "trainer.max_steps=2",
    "model.num_layers=1",
    "data.seq_length=16",
    "data.global_batch_size=4",
)


def shown(nxdt, *args, status=0, shape=None, **options):
    done = nxdt(*args, "--json", **options)
    assert done.returncode == status, done.stderr
    document = json.loads(done.stdout)
    has_shape(document, shape or f"`{' '.join(args[: 2 if args[0] in ('config', 'recipes', 'plugins') else 1])}`")
    return document


def has_shape(document, name):
    kind, keys = SHAPES[name]
    assert isinstance(document, list if kind == "list" else dict)
    for each in document if kind == "list" else [document]:
        assert list(each) == keys


def test_every_documented_shape_is_tested():
    tested = Path(__file__).read_text()
    for name in SHAPES:
        command, _, part = name.replace("`", "").partition(", each of ")
        words = ", ".join(f'"{word}"' for word in command.split())
        assert words in tested, name
        assert not part or f"each of `{part}`" in tested, name


def test_config_check_of_a_good_configuration(nxdt):
    found = shown(nxdt, "config", "check", "recipe:llama-tiny")
    assert (found["ok"], found["problems"], found["to_set"]) == (True, [], [])
    assert found["components"]["model"]["name"] == "llama"
    for each in found["components"].values():
        has_shape(each, "`config check`, each of `components`")


def test_config_check_of_mistakes(nxdt, work):
    (work / "run.yaml").write_text("base: recipe:llama-tiny\ntrainer:\n  max_stepz: 3\n")
    found = shown(nxdt, "config", "check", "run.yaml", "model.num_layers=many", status=2)
    assert found["ok"] is False
    for each in found["problems"]:
        has_shape(each, "`config check`, each of `problems`")
    first, second = found["problems"]
    assert (first["code"], first["place"], first["line"], first["key"]) == (
        "NXDT-C010",
        "run.yaml:3",
        3,
        "trainer.max_stepz",
    )
    assert (second["place"], second["line"], second["key"]) == ("command line", None, "model.num_layers")


def test_config_check_of_values_to_set(nxdt):
    found = shown(nxdt, "config", "check", "recipe:llama2-7b", status=1)
    assert (found["ok"], found["to_set"]) == (False, ["data.tokenizer.model", "data.train_files"])


def test_train_then_generate(nxdt):
    found = shown(nxdt, "train", "recipe:llama-tiny", *SMALL)
    assert (found["step"], found["exit_status"]) == (2, 0)
    assert found["loss"] > 0
    written = shown(nxdt, "generate", found["checkpoint"], "In", "--max-new-tokens", "3")
    assert (written["checkpoint"], written["prompt"]) == (found["checkpoint"], "In")


def test_train_on_two_ranks_prints_one_document(nxdt):
    assert shown(nxdt, "train", "recipe:llama-tiny", *SMALL, "trainer.devices=2")["consumed_tokens"] == 128


def test_sharding(nxdt):
    layout = ("trainer.devices=2", "distributed_strategy.tensor_model_parallel_size=2")
    found = shown(nxdt, "sharding", "recipe:hf-tiny", *layout)
    assert 0.5 <= found["share"] < 0.6
    assert "model.norm.weight" in found["whole"]


def test_recipes(nxdt):
    listed = shown(nxdt, "recipes", "list")
    found = shown(nxdt, "recipes", "show", "llama-tiny")
    assert {key: found[key] for key in ("name", "plugin", "summary")} in listed
    assert found["yaml"] == nxdt("recipes", "show", "llama-tiny").stdout


def test_plugins(nxdt):
    shown(nxdt, "plugins", "list")
    (found,) = shown(nxdt, "plugins", "show", "llama")
    assert [each["name"] for each in found["components"]] == ["llama", "mistral"]
    for each in found["components"]:
        has_shape(each, "`plugins show`, each of `components`")
    hooks = {each["hook"]: each["plugins"] for each in shown(nxdt, "plugins", "hooks")}
    assert "llama" in hooks["nxdt_model_builders"]


def test_plugins_verify(nxdt):
    assert shown(nxdt, "plugins", "verify", status=2)["problem"]["code"] == "NXDT-K010"
    nxdt("plugins", "lock")
    assert shown(nxdt, "plugins", "verify") == {"file": "nxdt-plugins.lock", "ok": True, "problem": None}


@pytest.mark.parametrize("code", ["C016", "NXDT-K010"])
def test_explain(code, nxdt):
    (found,) = shown(nxdt, "explain", code)
    assert found["code"].endswith(code)
