"""``nxdt recipes``."""

import json

from nxdt_core.cli.recipes import tasks_of
from nxdt_core.config.sources import EDITOR_LINES, Recipe
from nxdt_core.kernel import Kernel

HEAVY = ("torch", "numpy", "pytorch_lightning", "transformers")


def test_list_json_has_the_promised_shape(nxdt):
    done = nxdt("recipes", "list", "--json", without=HEAVY)
    rows = json.loads(done.stdout)
    assert all(set(row) == {"name", "plugin", "summary"} for row in rows)
    (tiny,) = [row for row in rows if row["name"] == "llama-tiny"]
    assert tiny["plugin"] == "llama"
    assert tiny["summary"]


def test_list_is_a_table_by_plugin_and_size(nxdt):
    lines = nxdt("recipes", "list").stdout.splitlines()
    assert lines[0].split() == ["PLUGIN,", "RECIPE", "SUMMARY"]
    assert lines[1] == "start here"
    assert [line.split()[0] for line in lines[2:5]] == ["llama-tiny", "llama-small", "llama-tiny-sft"]
    names = [line.split()[0] for line in lines[lines.index("llama") + 1 : lines.index("lora")]]
    assert names.index("llama-50m") < names.index("llama3-8b") < names.index("llama3-70b") < names.index("llama3.1-8b")
    assert all(len(line) <= 110 for line in lines)


def test_tasks_follow_from_the_components_of_a_recipe_and_of_those_below_it(nxdt):
    def names(*words):
        return {row["name"] for row in json.loads(nxdt("recipes", "list", *words, "--json").stdout)}

    assert {"llama-tiny", "llama3-70b-trn1", "gpt-6.7b", "hf-data-tiny"} <= names("--task", "pretraining")
    assert {"llama-tiny-sft", "llama3-8b-sft-lora-trn1"} <= names("--task", "sft")
    lora = names("--task", "LoRA")
    assert {"llama3-8b-sft-lora-trn1", "qwen2.5-0.5b-dpo-lora-16gb"} <= lora
    assert {"llama-tiny-dpo", "llama-tiny-kto", "llama-tiny-reward"} <= names("--task", "preference")
    assert names("--task", "distillation") == {"llama-tiny-distill"}
    assert names("--task", "grpo") == {"llama-tiny-grpo"}
    assert names("--task", "sft").isdisjoint(names("--task", "preference") | names("--task", "pre-training"))
    assert names("--task", "lora", "--device-memory", "24") == lora & names("--device-memory", "24")
    *_, last = nxdt("recipes", "list").stdout.splitlines()
    known = last.removeprefix("--task: ").split(", ")
    assert set().union(*(names("--task", task) for task in known)) == names()
    done = nxdt("recipes", "list", "--task", "cooking")
    assert done.returncode == 2
    assert f"no installed recipe is for 'cooking'; the tasks are {', '.join(known)}." in done.stderr


def test_recipes_that_are_broken_or_based_on_each_other_are_listed(tmp_path):
    """A plugin's own files: listing does not load them."""
    texts = {
        "loop": "base: recipe:pool\n",
        "pool": "base: recipe:loop\ndata: {name: text}\n",
        "self": "base: recipe:self\n",
        "list": "- 1\n",
        "broken": "data: [\n",
        "null": "data:\nobjective: {name: none-such}\n",
    }
    for name, text in texts.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    recipes = [Recipe(name=name, plugin="acme", path=tmp_path / f"{name}.yaml") for name in texts]
    tasks = {recipe.name: found for recipe, found in tasks_of(recipes, Kernel.start()).items()}
    assert tasks == {
        "loop": {"pretraining"},
        "pool": {"pretraining"},
        "self": set(),
        "list": set(),
        "broken": set(),
        "null": set(),
    }


def test_show_prints_the_yaml_below_the_lines_for_editors(nxdt, tmp_path):
    import importlib.resources

    text = (importlib.resources.files("nxdt_plugin_llama") / "recipes" / "llama-tiny.yaml").read_text()
    shown = nxdt("recipes", "show", "llama-tiny").stdout
    assert shown == EDITOR_LINES + text
    assert nxdt("recipes", "show", "recipe:llama-tiny").stdout == shown
    assert json.loads(nxdt("recipes", "show", "llama-tiny", "--json").stdout)["yaml"] == shown
    editor, how = shown.splitlines()[:2]
    assert editor == "# yaml-language-server: $schema=nxdt.schema.json"
    assert "`nxdt config schema > nxdt.schema.json`" in how
    (tmp_path / "mine.yaml").write_text(shown)
    assert Recipe(name="mine", plugin="", path=tmp_path / "mine.yaml").summary == text.splitlines()[0].lstrip("# ")


def test_a_file_that_is_made_from_a_recipe_is_a_run_of_its_own(nxdt, tmp_path):
    text = nxdt("recipes", "show", "llama-tiny").stdout
    (tmp_path / "my_run.yaml").write_text(text)
    (tmp_path / "based.yaml").write_text("base: recipe:llama-tiny\n")

    def directory(source, *overrides):
        lines = nxdt("config", "check", source, *overrides).stdout.splitlines()
        (line,) = [line for line in lines if line.startswith("run directory")]
        return line.split()[-1]

    assert directory("recipe:llama-tiny") == directory("recipe:llama:llama-tiny") == "nxdt_experiments/llama-tiny"
    assert directory(str(tmp_path / "my_run.yaml")) == "nxdt_experiments/my_run"
    assert directory(str(tmp_path / "based.yaml")) == "nxdt_experiments/based"
    assert directory(str(tmp_path / "my_run.yaml"), "name=other") == "nxdt_experiments/other"


def test_show_of_an_unknown_recipe_names_close_ones(nxdt):
    done = nxdt("recipes", "show", "lama-tiny")
    assert done.returncode == 2
    assert "llama-tiny" in done.stderr
    assert "Traceback" not in done.stderr
