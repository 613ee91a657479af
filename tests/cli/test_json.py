"""What ``--json`` prints has the keys of the documentation, in their order."""

import json
import re
from pathlib import Path

import click
import pytest

from nxdt_core.cli.app import root

PAGE = (Path(__file__).parents[2] / "docs/reference/terminal.md").read_text()
SHAPES = {
    command: (kind, re.findall(r"`(\w+)`", keys))
    for command, kind, keys in re.findall(r"^\| (`.*?) \| (object|list) \| (.*) \|$", PAGE, flags=re.MULTILINE)
}
GROUPS = ("checkpoint", "config", "data", "plugins", "recipes")
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
    has_shape(document, shape or f"`{' '.join(args[: 2 if args[0] in GROUPS else 1])}`")
    return document


def has_shape(document, name):
    kind, keys = SHAPES[name]
    assert isinstance(document, list if kind == "list" else dict)
    assert document, name
    for each in document if kind == "list" else [document]:
        assert list(each) == keys


def test_every_documented_shape_is_tested():
    tested = Path(__file__).read_text()
    for name in SHAPES.keys() - {"`plan --search`", "`launch NAME`"}:
        command, _, part = name.replace("`", "").partition(", each of ")
        words = ", ".join(f'"{word}"' for word in command.split())
        assert words in tested, name
        assert not part or f"each of `{part}`" in tested, name


def test_every_command_with_json_has_its_shape_documented():
    def walk(command, words):
        if any("--json" in parameter.opts for parameter in command.params):
            yield "`launch NAME`" if words[0] == "launch" else f"`{' '.join(words)}`"
        if isinstance(command, click.Group):
            context = click.Context(command)
            for name in command.list_commands(context):
                yield from walk(command.get_command(context, name), [*words, name])

    assert [name for name in walk(root, []) if name not in SHAPES] == []


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
    assert [each["name"] for each in found["components"]] == ["llama", "mistral", "qwen2", "qwen3"]
    for each in found["components"]:
        has_shape(each, "`plugins show`, each of `components`")
    hooks = {each["hook"]: each["plugins"] for each in shown(nxdt, "plugins", "hooks")}
    assert "llama" in hooks["nxdt_models"]


def test_plugins_verify(nxdt):
    assert shown(nxdt, "plugins", "verify", status=2)["problem"]["code"] == "NXDT-K010"
    nxdt("plugins", "lock")
    assert shown(nxdt, "plugins", "verify") == {"file": "nxdt-plugins.lock", "ok": True, "problem": None}


@pytest.mark.parametrize("code", ["C016", "NXDT-K010"])
def test_explain(code, nxdt):
    (found,) = shown(nxdt, "explain", code)
    assert found["code"].endswith(code)


def test_config_show_and_migrate(nxdt, work):
    found = shown(nxdt, "config", "show", "recipe:llama-tiny")
    assert found["origins"].keys() >= {"trainer.max_steps"}
    given = str(Path(__file__).parents[2] / "plugins/migration/nxd/tests/files/nemo_gpt.yaml")
    done = shown(nxdt, "config", "migrate", given, "--from", "nemo", "-o", "run.yaml")
    for each in done["keys"]:
        has_shape(each, "`config migrate`, each of `keys`")


def test_plan_env_and_preview(nxdt):
    for each in shown(nxdt, "plan", "recipe:llama-tiny")["ranks"]:
        has_shape(each, "`plan`, each of `ranks`")
    one = ("data.global_batch_size=4", "data.micro_batch_size=4")
    found = shown(nxdt, "plan", "recipe:llama-tiny", "--device", "H200", "--search", *one, shape="`plan --search`")
    assert all(list(each) == ["settings", *found["given"]] for each in found["found"])
    found = shown(nxdt, "env")
    for each in found["devices"]:
        has_shape(each, "`env`, each of `devices`")
    for each in found["packages"]:
        has_shape(each, "`env`, each of `packages`")
    for each in found["plugins"]:
        has_shape(each, "`env`, each of `plugins`")
    assert len(next(each["digest"] for each in found["plugins"] if each["name"] == "llama")) == 32
    shown(nxdt, "data", "preview", "recipe:llama-tiny")


def test_checkpoints(nxdt):
    ends = ("trainer.accelerator=cpu", "trainer.val_check_interval=null", "checkpoint.every_n_train_steps=1")
    run = shown(nxdt, "train", "recipe:llama-tiny", *SMALL, *ends)
    store = run["checkpoint"].rpartition("/")[0]
    assert len(shown(nxdt, "checkpoint", "list", store)) == 2
    found = shown(nxdt, "checkpoint", "inspect", run["checkpoint"])
    assert set(found["sections"]) == {"model", "optim", "state"}
    for each in found["sections"].values():
        has_shape(each, "`checkpoint inspect`, each of `sections`")
    for each in found["tensors"]:
        has_shape(each, "`checkpoint inspect`, each of `tensors`")
    shown(nxdt, "checkpoint", "verify", store)
    found = shown(nxdt, "checkpoint", "diff", f"{store}/step-00000001", f"{store}/step-00000002", status=1)
    for each in found["tensors"]:
        has_shape(each, "`checkpoint diff`, each of `tensors`")
    for each in found["values"]:
        has_shape(each, "`checkpoint diff`, each of `values`")
    shown(nxdt, "checkpoint", "copy", store, "copied")
    shown(nxdt, "checkpoint", "prune", store, "--keep-last", "1", "--dry-run")
    shown(nxdt, "checkpoint", "export", store, "hf")
    shown(nxdt, "checkpoint", "import", "hf", "imported")


def test_adapters_and_evaluation(nxdt, work):
    sizes = ("model.num_layers=1", "data.seq_length=64", "data.truncation=drop", "data.global_batch_size=4")
    ends = ("trainer.accelerator=cpu", "trainer.val_check_interval=null", "trainer.max_steps=1")
    run = shown(nxdt, "train", "recipe:llama-tiny-lora", *sizes, *ends)
    shown(nxdt, "checkpoint", "merge-lora", run["checkpoint"], "merged")
    shown(nxdt, "checkpoint", "export-lora", run["checkpoint"], "adapter")
    (work / "held-out.jsonl").write_text('{"input": "In the", "output": "beginning"}\n')
    shown(nxdt, "evaluate", run["checkpoint"], "held-out.jsonl", "--max-new-tokens", "2")


@pytest.mark.parametrize("words", [("slurm",), ("kubernetes", "--image", "my/image:1"), ("hyperpod",), ("local",)])
def test_launch(nxdt, words):
    found = shown(nxdt, "launch", *words, "recipe:llama-tiny", "--nodes", "2", shape="`launch NAME`")
    assert (found["nodes"], found["devices"], found["submitted"], found["to_set"]) == (2, 1, False, [])
    assert all(Path(file).is_file() for file in found["files"])


def test_token_files(nxdt, work):
    (work / "text.jsonl").write_text('{"text": "In the beginning"}\n')
    job = ("--input", "text.jsonl", "--output-prefix", "corpus", "--tokenizer", "byte", "--workers", "1")
    shown(nxdt, "data", "preprocess", *job)
    shown(nxdt, "data", "inspect", "corpus")
    shown(nxdt, "data", "merge", "corpus", "--output-prefix", "joined")


DEFAULTS = """
from nxdt_core.api import hookimpl

@hookimpl
def nxdt_config_defaults(context):
    return {"exp_manager": {"log_parameter_norm": True}}
"""


def test_plugins_by_kind_and_their_state(nxdt, dist, tmp_path):
    dist("acme", DEFAULTS)
    shown(nxdt, "plugins", "list", "--kind", "optimizer", shape="`plugins list --kind`")
    shown(nxdt, "plugins", "doctor")
    found = shown(nxdt, "plugins", "trace", "recipe:llama-tiny")
    for each in found["calls"]:
        has_shape(each, "`plugins trace`, each of `calls`")
    assert found["defaults"]
    for each in found["defaults"]:
        has_shape(each, "`plugins trace`, each of `defaults`")
    shown(nxdt, "plugins", "check", "acme", status=1)
    index = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "PIP_CONFIG_FILE": "/dev/null"}
    shown(nxdt, "plugins", "outdated", "acme", **index)
