"""A third party's plugin, built outside the tree and installed from wheels, with one component of each kind."""

import ast
import json

import pytest

from nxdt_core.api import KINDS

SEVEN = (
    "model",
    "dataset",
    "tokenizer",
    "optimizer",
    "schedule",
    "precision",
    "store",
)
PUBLIC = (
    "nxdt_core.api",
    "nxdt_core.config.section",
    "nxdt_core.errors",
    "nxdt_core.models",
    "nxdt_core.models",
    "nxdt_core.protocols",
    "nxdt_testing",
)


def _nxdt(clean, *args, cwd):
    done = clean.run("nxdt", *args, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def plugins(clean, tmp_path_factory):
    """What ``nxdt plugins list`` says of each plugin, by its name."""
    listed = _nxdt(clean, "plugins", "list", "--json", cwd=tmp_path_factory.mktemp("plugins"))
    return {row["name"]: row for row in json.loads(listed)}


def _losses(path):
    """Loss by step; after a resume the last row of a step counts."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows}


def test_they_import_nothing_private(outside, engine):
    for path in (*(outside / "src").rglob("*.py"), *(engine / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for module in modules:
                assert not module.startswith("nxdt") or module.startswith(PUBLIC), f"{path.name}: {module}"


def test_the_environment_runs_the_wheels_and_not_the_tree(clean, printed):
    assert printed["files"].keys() == {"nxdt_core", "nxdt_plugin_llama", "nxdt_plugin_text", "acme_nxdt"}
    for path in printed["files"].values():
        assert path.startswith(str(clean.site))


def test_plugins_list_shows_all_of_them(plugins):
    assert set(plugins) == {"builtin", "llama", "text", "acme", "solo"}
    assert {row["state"] for row in plugins.values()} == {"ok"}


def test_one_component_of_each_of_the_seven_kinds_and_two_more_models_are_registered(plugins):
    kinds = sorted(component["kind"] for component in plugins["acme"]["components"])
    assert kinds == sorted((*SEVEN, "model", "model"))
    assert set(SEVEN) <= {kind.name for kind in KINDS}


@pytest.mark.slow  # 10 CPU-seconds of imports; tests/testing runs the kits from the tree
def test_its_own_tests_and_the_contract_of_engines_pass_with_the_kits_of_the_wheel(clean, outside, engine, tmp_path):
    words = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib")
    done = clean.run("python", *words, outside / "tests", engine / "tests", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


def _each(*words):
    return ["train", f"recipe:{words[0]}", "trainer.log_every_n_steps=1", *words[1:]]


SIZES = ("num_layers=2", "hidden_size=32", "ffn_hidden_size=48", "num_attention_heads=4", "vocab_size=16")
COMMANDS = [
    _each("llama-tiny", "trainer.accelerator=cpu", "trainer.max_steps=4"),
    _each("llama-tiny", "name=solo", "parallel_engine.name=solo", "trainer.accelerator=cpu", "trainer.max_steps=4"),
    *(
        _each("acme-tour", f"name={name}", f"checkpoint.uri=sqlite://{name}.db", f"trainer.max_steps={end}")
        for name, end in (("whole", 8), ("halves", 4), ("halves", 8))
    ),
    [
        *_each("acme-tour", "name=decoder", "trainer.max_steps=8", "precision.type=fp32", "model.name=acme-decoder"),
        *(f"model.{size}" for size in SIZES),
    ],
    ["checkpoint", "list", "sqlite://halves.db", "--json"],
    ["checkpoint", "verify", "sqlite://halves.db"],
    ["generate", "sqlite://halves.db", "12+", "--max-new-tokens", "5"],
]
ALL = """
import io, json, sys
from contextlib import redirect_stdout
from nxdt_core.cli import main
found = {}
for words in json.loads(sys.argv[1]):
    with redirect_stdout(io.StringIO()) as printed:
        status = main(words)
    if status:
        sys.exit(f"{words}: {status} {printed.getvalue()}")
    found[" ".join(words[:2])] = printed.getvalue()
modules = "nxdt_core", "nxdt_plugin_llama", "nxdt_plugin_text", "acme_nxdt"
found["files"] = {name: sys.modules[name].__file__ for name in modules}
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The directory of all runs."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def printed(clean, runs):
    """What the last command of each kind printed, all in one process: ``halves`` was stopped and resumed."""
    done = clean.run("python", "-c", ALL, json.dumps(COMMANDS), cwd=runs)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def losses(printed, runs):
    """Losses by step of a run that is named."""
    return lambda name: _losses(runs / "nxdt_experiments" / name / "metrics.jsonl")


def test_a_recipe_of_the_wheels_trains(losses):
    assert list(losses("llama-tiny")) == [1, 2, 3, 4]


def test_all_seven_train_and_resume_bitwise(losses):
    whole = losses("whole")
    assert whole == losses("halves")
    assert list(whole) == list(range(1, 9))
    assert whole[8] < whole[1]


def test_checkpoints_lie_in_its_store(printed):
    rows = json.loads(printed["checkpoint list"])
    assert [row["step"] for row in rows if row["state"] == "committed"][-1] == 8
    assert "checkpoint verify" in printed


def test_the_decoder_made_of_parts_of_the_core_trains(losses):
    found = losses("decoder")
    assert list(found) == list(range(1, 9))
    assert found[8] < found[1]


def test_it_generates_with_its_model_tokenizer_and_store(printed):
    text = printed["generate sqlite://halves.db"]
    assert text.startswith("12+")
    assert len(text.strip()) > 3


def test_its_engine_trains_as_the_engine_on_stock_torch_does(losses):
    assert losses("solo") == pytest.approx(losses("llama-tiny"), rel=1e-4)
