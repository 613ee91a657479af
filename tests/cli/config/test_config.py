"""``nxdt config`` through the command; what is right and wrong is tested with the configuration itself."""

import json

import pytest

HEAVY = ("torch", "numpy", "pytorch_lightning", "transformers")


@pytest.fixture
def recipe(nxdt, tmp_path):
    """A YAML file that is right."""
    path = tmp_path / "run.yaml"
    path.write_text(nxdt("recipes", "show", "llama-tiny").stdout)
    return path


def test_check_says_what_would_run(nxdt, recipe):
    done = nxdt("config", "check", str(recipe), without=HEAVY)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"ok: {recipe}\n")
    rows = dict(line.split()[:2] for line in done.stdout.splitlines()[1:])
    assert (rows["model"], rows["dataset"], rows["optimizer"]) == ("llama", "text", "adamw")


def test_check_of_a_recipe_with_overrides(nxdt):
    assert nxdt("config", "check", "recipe:llama-tiny", "trainer.max_steps=7").returncode == 0


def test_check_tells_every_mistake_at_once_with_file_and_line(nxdt, recipe):
    text = recipe.read_text().replace("max_steps: 40", "max_stepz: 40", 1).replace("seed: 1234", "seed: soon")
    recipe.write_text(text)
    done = nxdt("config", "check", str(recipe), "model.optim.lr=fast")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    for wanted in ("max_stepz", "max_steps", "run.yaml:", "seed", "model.optim.lr", "[NXDT-C"):
        assert wanted in done.stderr, wanted


def test_train_tells_the_same_mistakes_without_importing_torch(nxdt, recipe):
    recipe.write_text(recipe.read_text().replace("max_steps: 40", "max_stepz: 40", 1))
    check = nxdt("config", "check", str(recipe))
    train = nxdt("train", str(recipe), without=HEAVY)
    assert (train.returncode, train.stderr) == (2, check.stderr)


def test_a_file_that_is_not_there(nxdt):
    for verb in (["config", "check"], ["config", "show"], ["train"]):
        done = nxdt(*verb, "nowhere.yaml")
        assert done.returncode == 2
        assert "nowhere.yaml" in done.stderr
        assert "Traceback" not in done.stderr


def test_a_recipe_without_its_prefix_is_suggested(nxdt):
    assert "Did you mean 'recipe:llama-tiny'?" in nxdt("train", "llama-tiny", without=HEAVY).stderr


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (("train", "recipe:llama-tiny", "--max-steps", "100"), "'trainer.max_steps=100'"),
        (("plan", "--devices=4"), "'trainer.devices=4'"),
        (("config", "check", "x.yaml", "--model.optim.lr"), "'model.optim.lr=VALUE'"),
        (("train", "x.yaml", "--max-restart", "3"), "'--max-restarts'"),
        (("config", "check", "recipe:llama-tiny", "precision.type=bf16"), "'autocast' or 'mixed_precision'"),
        (("config", "check", "recipe:llama-tiny", "precision.type=FP16"), "'mixed_precision'"),
        (("config", "check", "recipe:llama-tiny", "precision.type=float32"), "'fp32'"),
    ],
)
def test_what_other_programs_are_given_suggests_what_is_meant(nxdt, words, meant):
    done = nxdt(*words, without=HEAVY)
    assert done.returncode == 2
    assert f"Did you mean {meant}?" in done.stderr


def test_data_that_are_not_on_this_machine_are_a_note(nxdt, tmp_path):
    for name in ("one.txt", "tokens.bin"):
        (tmp_path / name).touch()
    paths = ("none.txt", "one.txt", "*.txt", "*.md", "tokens")
    files = ",".join(str(tmp_path / each) for each in paths)
    done = nxdt("config", "check", "recipe:llama-tiny", f"data.train_files=[{files}]")
    missing = [line for line in done.stderr.split("note: ") if "not on this machine" in " ".join(line.split())]
    assert [any(f"/{name} " in " ".join(line.split()) for line in missing) for name in paths] == [1, 0, 0, 1, 0]
    assert done.returncode == 0


def test_passes_over_the_data_may_end_a_run_alone(nxdt, recipe):
    recipe.write_text(recipe.read_text().replace("  max_steps: 40\n", "", 1))
    assert "trainer.max_steps" in nxdt("config", "check", str(recipe)).stderr
    assert nxdt("config", "check", str(recipe), "trainer.max_epochs=1").returncode == 0


def test_notes_go_to_standard_error(nxdt):
    done = nxdt("config", "check", "recipe:llama-tiny", "compiler_cache_url=/graphs")
    assert done.returncode == 0
    assert "note: " in done.stderr
    assert "compiler_cache_url" in done.stderr
    assert "note" not in done.stdout


def test_show_can_be_trained_again(nxdt, recipe, tmp_path):
    first = nxdt("config", "show", str(recipe), "trainer.max_steps=9").stdout
    assert "# command line" in first
    again = tmp_path / "again.yaml"
    again.write_text(first)
    trees = [json.loads(nxdt("config", "show", *args, "--json").stdout)["config"] for args in _both(recipe, again)]
    assert trees[0] == trees[1]


def test_show_set_leaves_defaults_out(nxdt, recipe):
    short = nxdt("config", "show", str(recipe), "--set").stdout.splitlines()
    assert len(short) < len(nxdt("config", "show", str(recipe)).stdout.splitlines())
    assert not [line for line in short if line.endswith("# default")]


def test_show_json_gives_values_and_origins(nxdt, recipe):
    shown = json.loads(nxdt("config", "show", str(recipe), "trainer.max_steps=9", "--json").stdout)
    assert shown["config"]["trainer"]["max_steps"] == 9
    assert shown["origins"]["trainer.max_steps"]["kind"] == "override"
    seed = shown["origins"]["seed"]
    assert seed["kind"] == "file"
    assert recipe.read_text().splitlines()[seed["line"] - 1].startswith("seed:")
    assert shown["origins"]["trainer.num_nodes"]["kind"] == "default"


def test_schema_is_json_and_knows_the_plugins(nxdt):
    done = nxdt("config", "schema")
    assert json.loads(done.stdout)["properties"]["trainer"]
    assert "num_kv_heads" in done.stdout


def _both(recipe, again):
    return (str(recipe), "trainer.max_steps=9"), (str(again),)


def test_a_name_that_leaves_the_directory_of_runs_is_refused_where_it_is_written(nxdt, recipe):
    recipe.write_text(f"name: ../../x\n{recipe.read_text()}")
    done = nxdt("config", "check", str(recipe))
    assert done.returncode == 2
    assert "run.yaml:1: name: the directory '../../x' of the run would not be in" in " ".join(done.stderr.split())
    assert done.stderr.count("NXDT-C016") == 2, "once, with how to read more"
    assert nxdt("config", "check", str(recipe), "exp_manager.explicit_log_dir=../x").returncode == 0
