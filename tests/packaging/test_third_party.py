"""A third party's plugin, built outside the tree and installed from wheels, with one component of each kind."""

import ast
import json

import pytest

from nxdt_core.api import KINDS
from tests.sampling import takes_all

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


def test_its_own_tests_pass_with_the_kit_of_the_wheel(clean, outside, tmp_path, pytestconfig):
    """Of the tests on ranks, only one that shards the values of heads, unless all samples are taken."""
    some = () if takes_all(pytestconfig) else ("-k", "not (in_a_layout or shards_are) or (TestAlibi and tp and not sp)")
    done = clean.run("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", outside / "tests", *some, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


def test_a_recipe_of_the_wheels_trains(clean, tmp_path):
    _nxdt(clean, "train", "recipe:llama-tiny", "trainer.max_steps=4", "trainer.log_every_n_steps=1", cwd=tmp_path)
    losses = _losses(tmp_path / "nxdt_experiments" / "llama-tiny" / "metrics.jsonl")
    assert list(losses) == [1, 2, 3, 4]


@pytest.fixture(scope="module")
def runs(clean, tmp_path_factory):
    """A directory with two runs of all seven components: ``whole``, and ``halves``, which was stopped and resumed."""
    directory = tmp_path_factory.mktemp("runs")
    for name, ends in (("whole", (12,)), ("halves", (6, 12))):
        for end in ends:
            own = (f"name={name}", f"checkpoint.uri=sqlite://{name}.db", f"trainer.max_steps={end}")
            _nxdt(clean, "train", "recipe:acme-tour", "trainer.log_every_n_steps=1", *own, cwd=directory)
    return directory


@pytest.mark.slow
def test_all_seven_train_and_resume_to_the_bit(runs):
    whole, halves = (_losses(runs / "nxdt_experiments" / name / "metrics.jsonl") for name in ("whole", "halves"))
    assert whole == halves
    assert list(whole) == list(range(1, 13))
    assert whole[12] < whole[1]


@pytest.mark.slow
def test_checkpoints_lie_in_its_store(clean, runs):
    rows = json.loads(_nxdt(clean, "checkpoint", "list", "sqlite://halves.db", "--json", cwd=runs))
    assert [row["step"] for row in rows if row["state"] == "committed"][-1] == 12
    _nxdt(clean, "checkpoint", "verify", "sqlite://halves.db", cwd=runs)


def test_the_decoder_made_of_parts_of_the_core_trains(clean, tmp_path):
    sizes = ("num_layers=2", "hidden_size=32", "ffn_hidden_size=48", "num_attention_heads=4", "vocab_size=16")
    model = (f"model.{size}" for size in ("name=acme-decoder", *sizes))
    own = ("name=decoder", "trainer.max_steps=12", "trainer.log_every_n_steps=1", "precision.type=fp32")
    _nxdt(clean, "train", "recipe:acme-tour", *own, *model, cwd=tmp_path)
    losses = _losses(tmp_path / "nxdt_experiments" / "decoder" / "metrics.jsonl")
    assert list(losses) == list(range(1, 13))
    assert losses[12] < losses[1]


@pytest.mark.slow
def test_it_generates_with_its_model_tokenizer_and_store(clean, runs):
    text = _nxdt(clean, "generate", "sqlite://halves.db", "12+", "--max-new-tokens", "5", cwd=runs)
    assert text.startswith("12+")
    assert len(text.strip()) > 3


def test_its_engine_passes_the_contract_of_engines_with_the_kit_of_the_wheel(clean, engine, tmp_path):
    done = clean.run("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", engine / "tests", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


def test_its_engine_trains_as_the_engine_on_stock_torch_does(clean, tmp_path):
    found = {}
    for name in ("solo", "torch"):
        own = (f"name={name}", f"parallel_engine.name={name}", "trainer.accelerator=cpu", "trainer.max_steps=4")
        _nxdt(clean, "train", "recipe:llama-tiny", "trainer.log_every_n_steps=1", *own, cwd=tmp_path)
        found[name] = _losses(tmp_path / "nxdt_experiments" / name / "metrics.jsonl")
    assert found["solo"] == pytest.approx(found["torch"], rel=1e-4)
