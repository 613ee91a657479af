"""A third party's plugin, built outside the tree and installed from wheels, with one component of each kind."""

import ast
import json

import pytest

from nxdt_core.api import KINDS

SEVEN = (
    "model_builder",
    "dataloader",
    "tokenizer",
    "optimizer",
    "lr_scheduler",
    "precision_policy",
    "checkpoint_storage",
)
PUBLIC = (
    "nxdt_core.api",
    "nxdt_core.config.huggingface.values",
    "nxdt_core.errors",
    "nxdt_core.models",
    "nxdt_core.nn",
    "nxdt_core.protocols",
    "nxdt_core.testing",
)


def _nxdt(clean, *args, cwd):
    done = clean.run("nxdt", *args, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout


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


def test_the_environment_runs_the_wheels_and_not_the_tree(clean, tmp_path):
    code = (
        "import nxdt_core, nxdt_plugin_llama, nxdt_plugin_text, acme_nxdt as a; print(nxdt_core.__file__, a.__file__)"
    )
    for path in clean.run("python", "-c", code, cwd=tmp_path).stdout.split():
        assert path.startswith(str(clean.site))


def test_plugins_list_shows_all_of_them(clean, tmp_path):
    rows = {row["name"]: row for row in json.loads(_nxdt(clean, "plugins", "list", "--json", cwd=tmp_path))}
    assert set(rows) == {"builtin", "llama", "text", "acme", "solo"}
    assert {row["state"] for row in rows.values()} == {"ok"}


def test_one_component_of_each_of_the_seven_kinds_and_two_more_models_are_registered(clean, tmp_path):
    rows = json.loads(_nxdt(clean, "plugins", "list", "--json", cwd=tmp_path))
    (acme,) = [row for row in rows if row["name"] == "acme"]
    kinds = sorted(component["kind"] for component in acme["components"])
    assert kinds == sorted((*SEVEN, "model_builder", "model_builder"))
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
    _each("llama-tiny", "trainer.max_steps=4"),
    *(
        _each("acme-tour", f"name={name}", f"checkpoint.uri=sqlite://{name}.db", f"trainer.max_steps={end}")
        for name, end in (("whole", 12), ("halves", 6), ("halves", 12))
    ),
    [
        *_each("acme-tour", "name=decoder", "trainer.max_steps=12", "precision.type=fp32", "model.name=acme-decoder"),
        *(f"model.{size}" for size in SIZES),
    ],
    *(
        _each(
            "llama-tiny",
            *(f"name={name}", f"parallel_engine.name={name}", "trainer.accelerator=cpu", "trainer.max_steps=4"),
        )
        for name in ("solo", "torch")
    ),
]
ALL = """
import json, sys
from nxdt_core.cli import main
for words in json.loads(sys.argv[1]):
    if status := main(words):
        sys.exit(status)
"""


@pytest.fixture(scope="module")
def runs(clean, tmp_path_factory):
    """The directory of all runs, which one process made: ``halves`` was stopped and resumed."""
    directory = tmp_path_factory.mktemp("runs")
    done = clean.run("python", "-c", ALL, json.dumps(COMMANDS), cwd=directory)
    assert done.returncode == 0, done.stderr
    return directory


@pytest.fixture
def losses(runs):
    """Losses by step of a run that is named."""
    return lambda name: _losses(runs / "nxdt_experiments" / name / "metrics.jsonl")


def test_a_recipe_of_the_wheels_trains(losses):
    assert list(losses("llama-tiny")) == [1, 2, 3, 4]


def test_all_seven_train_and_resume_bitwise(losses):
    whole = losses("whole")
    assert whole == losses("halves")
    assert list(whole) == list(range(1, 13))
    assert whole[12] < whole[1]


def test_checkpoints_lie_in_its_store(clean, runs):
    rows = json.loads(_nxdt(clean, "checkpoint", "list", "sqlite://halves.db", "--json", cwd=runs))
    assert [row["step"] for row in rows if row["state"] == "committed"][-1] == 12
    _nxdt(clean, "checkpoint", "verify", "sqlite://halves.db", cwd=runs)


def test_the_decoder_made_of_parts_of_the_core_trains(losses):
    found = losses("decoder")
    assert list(found) == list(range(1, 13))
    assert found[12] < found[1]


def test_it_generates_with_its_model_tokenizer_and_store(clean, runs):
    text = _nxdt(clean, "generate", "sqlite://halves.db", "12+", "--max-new-tokens", "5", cwd=runs)
    assert text.startswith("12+")
    assert len(text.strip()) > 3


def test_its_engine_trains_as_the_engine_on_stock_torch_does(losses):
    assert losses("solo") == pytest.approx(losses("torch"), rel=1e-4)
