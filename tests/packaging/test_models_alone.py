"""One model's wheel is enough: installed with nothing else of ours, its tiny recipe trains.

One of the models, which ``--samples`` decides; ``--samples=all`` takes all.
"""

import json
import tomllib
from pathlib import Path

import pytest

from tests.sampling import sampled

ROOT = Path(__file__).parents[2]


def _recipes():
    """(distribution, recipe) of every tiny recipe of a model plugin."""
    for project in sorted(ROOT.glob("plugins/models/*/pyproject.toml")):
        name = tomllib.loads(project.read_text())["project"]["name"]
        for recipe in sorted(project.parent.glob("src/*/recipes/*-tiny.yaml")):
            yield name, recipe.stem


RECIPES = tuple(_recipes())


def pytest_generate_tests(metafunc):
    if "recipe" in metafunc.fixturenames:
        chosen = sampled(metafunc.config, RECIPES, 1)
        metafunc.parametrize(("dist", "recipe"), chosen, ids=[recipe for _, recipe in chosen])


def test_every_model_plugin_has_a_tiny_recipe():
    plugins = {path.parent.name for path in ROOT.glob("plugins/models/*/pyproject.toml")}
    assert {dist.removeprefix("nxdt-plugin-") for dist, _ in RECIPES} == plugins


def _plugins_asked_for(dist):
    path = ROOT / "plugins/models" / dist.removeprefix("nxdt-plugin-") / "pyproject.toml"
    asked = tomllib.loads(path.read_text())["project"]["dependencies"]
    return {each.partition(">")[0] for each in asked if each.startswith("nxdt-plugin-")}


@pytest.mark.slow
def test_a_model_trains_from_its_wheel_and_what_that_asks_for(environment, dist, recipe, tmp_path):
    clean = environment(dist)
    rows = json.loads(clean.run("nxdt", "plugins", "list", "--json", cwd=tmp_path).stdout)
    assert {row["dist"] for row in rows} == {"nxdt-core", dist, *_plugins_asked_for(dist)}
    keys = ("trainer.max_steps=3", "model.optim.sched.max_steps=6", "trainer.log_every_n_steps=1")
    done = clean.run("nxdt", "train", f"recipe:{recipe}", *keys, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    metrics = Path(tmp_path, "nxdt_experiments", recipe, "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in metrics] == [1, 2, 3]
    if dist != "nxdt-plugin-hf":
        (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Gemma3ForCausalLM"]}))
        refused = clean.run("nxdt", "checkpoint", "import", ".", "store", cwd=tmp_path)
        assert refused.returncode == 2
        assert "pip install nxdt-plugin-hf" in refused.stderr
