"""Recipes with values that only the user knows: what is to be set is said, and nothing pretends to be right."""

import pytest

KEYS = ("checkpoint.resume_from", "data.tokenizer.model", "data.train_files")


def test_config_check_names_the_values_to_set_and_fails(nxdt):
    done = nxdt("config", "check", "recipe:llama3-8b-sft")
    first, *_ = done.stdout.splitlines()
    count, _, keys = first.partition(": ")
    assert (done.returncode, count, done.stderr) == (1, "3 values to set", "")
    assert sorted(keys.split(", ")) == list(KEYS)
    assert "ok" not in done.stdout.split()


def test_what_is_set_is_not_named(nxdt):
    given = ["data.tokenizer.model=x.json", "data.train_files=[x.jsonl]"]
    done = nxdt("config", "check", "recipe:llama3-8b-sft", *given)
    assert (done.returncode, done.stdout.splitlines()[0]) == (1, "1 value to set: checkpoint.resume_from")
    done = nxdt("config", "check", "recipe:llama3-8b-sft", *given, "checkpoint.resume_from=x")
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, "ok: recipe:llama3-8b-sft")


@pytest.mark.parametrize("command", [("train",), ("data", "preview")])
def test_commands_that_need_the_values_refuse_and_say_how_to_set_them(command, nxdt):
    done = nxdt(*command, "recipe:llama3-8b-sft")
    assert done.returncode == 2
    assert done.stderr.startswith("[NXDT-C040] recipe:llama3-8b-sft: 3 values to set: ")
    assert "data.train_files=..." in done.stderr


def test_a_printed_recipe_is_recognised_as_a_file(nxdt, work):
    text = nxdt("recipes", "show", "llama2-7b").stdout
    assert "/set/" not in text
    (work / "my_run.yaml").write_text(text)
    done = nxdt("config", "check", "my_run.yaml")
    assert (done.returncode, done.stdout.splitlines()[0]) == (
        1,
        "2 values to set: data.tokenizer.model, data.train_files",
    )
