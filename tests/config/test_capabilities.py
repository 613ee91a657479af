"""What a record does not declare, no configuration can ask for; what our own records declare is complete and proved."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from nxdt_core import config
from nxdt_core.api import CAPABILITIES
from nxdt_core.errors.configuration import CapabilityMissing, ConfigError
from nxdt_core.kernel import Kernel, PluginPolicy

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
STRATEGY = "distributed_strategy."
TWO = "trainer.devices=2"
TP2, CP2, PP2 = (
    f"{STRATEGY}{name}=2"
    for name in ("tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size")
)
SETTINGS = {
    "dp": (TWO, f"{STRATEGY}zero1=false"),
    "tp": (TWO, TP2),
    "pp": (TWO, PP2),
    "cp": (TWO, CP2, f"{STRATEGY}zero1=false"),
    "ep": (TWO, f"{STRATEGY}expert_model_parallel_size=2"),
    "adapters": ("model.trainable=['*']",),
    "recompute": ("model.activations_checkpoint_granularity=full",),
    "compile": ("model.compile=true",),
    "param_groups": ("model.optim.param_groups=[{params: '*', lr: 0.1}]",),
    "precision": ("precision.type=autocast",),
}
"""Capability of an engine → settings that need it."""
PRECISIONS = {
    "bfloat16": ("precision={type: manual, xla_use_bf16: true}",),
    "masters": ("precision.type=mixed_precision",),
    "gradients": ("precision={type: manual, xla_downcast_bf16: true, fp32_grad_acc: true}",),
    "rounding": ("precision.type=bf16SR",),
}

ELSEWHERE = {
    "adapters": "tests/engine/layouts/test_lora_layouts.py",
    "frozen_model": "plugins/objectives/distill/tests/test_distill_layouts.py",
    "compile": "tests/engine/compile/test_compiled_runs.py",
    "param_groups": "tests/engine/optimizer/test_optimizers_sharded.py",
    "precision": "tests/engine/precision/test_mixed_precision.py",
}
"""Capability of the torch engine that is not a layout of the matrix → the tests that show that it works."""


@pytest.fixture(scope="module")
def bare() -> Kernel:
    """The built-ins, the parts of the configuration's tests, and components that declare nothing."""
    return Kernel.start(PluginPolicy(allow=(), local=(HERE / "parts.py", HERE / "bare_parts.py")))


@pytest.fixture
def missing(bare, good, tmp_path, monkeypatch):
    """``missing(*overrides)``: (role, name, capability) that the configuration lacks; other problems are left out."""
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(good)

    def found(*overrides):
        try:
            config.load("run.yaml", overrides, kernel=bare)
        except ConfigError as error:
            lacks = [problem for problem in error.problems if isinstance(problem, CapabilityMissing)]
            return [(problem.kind, problem.name, problem.capability) for problem in lacks]
        return []

    return found


@pytest.mark.parametrize("capability", SETTINGS)
def test_an_engine_is_asked_for_nothing_that_it_does_not_declare(missing, capability):
    lacks = missing("parallel_engine.name=bare", "model.moe={num_experts: 2}", *SETTINGS[capability])
    assert capability in {name for kind, _, name in lacks if kind == "engine"}
    assert not [name for kind, _, name in missing(*SETTINGS[capability]) if kind == "engine"], "torch declares it"


@pytest.mark.parametrize("policy", PRECISIONS)
def test_each_other_dtype_than_float32_needs_the_capability(missing, policy):
    assert ("engine", "bare", "precision") in missing("parallel_engine.name=bare", *PRECISIONS[policy])
    assert missing(*PRECISIONS[policy]) == []


def test_every_capability_of_an_engine_is_asked_for_by_some_setting():
    assert CAPABILITIES["engine"].keys() == SETTINGS.keys() | {"frozen_model", "xla"}


def test_a_run_of_one_process_in_float32_asks_for_nothing(missing):
    assert missing("parallel_engine.name=bare", "model.name=bare-model", "model.optim.name=bare-sgd") == []


@pytest.mark.parametrize(
    ("overrides", "lacks"),
    [
        ((TP2, TWO), [("model", "tp"), ("optimizer", "sharded")]),
        ((TP2, TWO, f"{STRATEGY}sequence_parallel=true"), [("model", "tp"), ("optimizer", "sharded")]),
        ((CP2, TWO, f"{STRATEGY}zero1=false"), [("model", "cp")]),
        ((PP2, TWO), [("model", "pp")]),
        ((TWO,), [("optimizer", "sharded")]),
        ((TWO, f"{STRATEGY}zero1=false"), []),
    ],
)
def test_a_model_and_an_optimizer_are_asked_for_nothing_that_they_do_not_declare(missing, overrides, lacks):
    found = missing("model.name=bare-model", "model.optim.name=bare-sgd", *overrides)
    assert [(kind, capability) for kind, _, capability in found] == lacks


def test_the_message_says_who_lacks_what_and_what_to_do(bare, good, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(good)
    with pytest.raises(ConfigError) as raised:
        config.load("run.yaml", ["parallel_engine.name=bare", TP2, TWO], kernel=bare)
    (row,) = [problem.row() for problem in raised.value.problems]
    assert row == (
        f"command line: {TP2.partition('=')[0]}: found 2, which needs the capability 'tp' (shards the matrices of"
        " layers over ranks); the engine 'bare' of local does not declare it. Set it to 1, or set"
        " parallel_engine.name to 'torch'. For its authors: add 'tp' to the capabilities of the record once the"
        " component does this. [NXDT-C022]"
    )


# Rules of engines


def rows(kernel, good, *overrides):
    try:
        config.load(config_of(good), overrides, kernel=kernel)
    except ConfigError as error:
        return [problem.row() for problem in error.problems]
    return []


def config_of(good):
    return yaml.safe_load(good.replace("1e-3", "0.001"))


def test_rules_of_an_engine_run_where_it_is_selected(bare, good):
    assert rows(bare, good, "seed=13") == []
    (row,) = rows(bare, good, "seed=13", "parallel_engine.name=odd")
    assert row == "command line: seed: 13 is unlucky here. Set seed to 14. [NXDT-C016]"


def test_rules_of_the_torch_engine_do_not_speak_for_another(bare, good):
    heads = ("model.num_attention_heads=3", "model.hidden_size=33", TP2, TWO)
    assert any("3 does not divide by tensor_model_parallel_size 2" in row for row in rows(bare, good, *heads))
    others = rows(bare, good, *heads, "parallel_engine.name=bare")
    assert not any("divide by tensor" in row for row in others)


@pytest.mark.parametrize(
    ("engine", "code", "reason"),
    [("raises", "NXDT-C018", "its rules raised KeyError"), ("lost", "NXDT-K006", "its record gives rules='")],
)
def test_rules_that_fail_are_the_engines_fault(bare, good, engine, code, reason):
    (row,) = rows(bare, good, f"parallel_engine.name={engine}")
    assert row.startswith("command line: parallel_engine.name: ")
    assert code in row
    assert reason in row


def test_rules_of_the_torch_engine_see_the_policy(bare, good):
    (row,) = rows(bare, good, "precision.type=float16")
    assert row.startswith("command line: precision.type: the engine torch does not compute with float16 parameters")
    assert rows(bare, good, "precision.type=secret") == []


# What is known only when something is built or started


def test_what_a_policy_needs_is_asked_of_the_engine(missing):
    lacks = missing("parallel_engine.name=bare", "precision.type=secret")
    assert ("engine", "bare", "precision") in lacks


def test_processes_that_somebody_else_starts_are_counted_before_the_engine_is_built(bare, good, monkeypatch):
    from nxdt_core.train import build

    run = config.load(config_of(good), ["parallel_engine.name=bare"], kernel=bare)
    launched = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as raised:
        build.engine(run)
    (problem,) = raised.value.problems
    assert problem.row().startswith("the processes that were started: trainer.devices: found 2 data parallel ranks")
    assert problem.capability == "dp"


# Our own records


@pytest.fixture(scope="module")
def everything() -> Kernel:
    """The built-ins and all our plugins that are installed."""
    return Kernel.start(strict=True)


def test_the_torch_engine_declares_all_but_what_no_test_shows(everything):
    declared = everything.registry.get("engine", "torch").record.capabilities
    assert CAPABILITIES["engine"].keys() - declared == {"xla"}


def shown_by(layout):
    """Capabilities of an engine that a layout of the matrix needs."""
    needed = {
        "dp": layout.dp > 1,
        "tp": layout.tp > 1,
        "pp": layout.pp > 1,
        "cp": layout.cp > 1,
        "ep": layout.ep > 1,
        "recompute": layout.recompute is not None,
    }
    return {name for name, is_needed in needed.items() if is_needed}


def test_tests_show_that_the_torch_engine_does_what_it_declares(everything):
    from tests.engine.matrix.layouts import LAYOUTS as matrix

    declared = everything.registry.get("engine", "torch").record.capabilities
    assert declared == set().union(*map(shown_by, matrix)) | ELSEWHERE.keys()
    assert all((ROOT / path).is_file() for path in ELSEWHERE.values())


LLAMA = {"tp", "sp", "pp", "cp", "lora"}
MODELS = {"gpt": LLAMA, "hf": LLAMA | {"ep"}, "llama": LLAMA, "mistral": LLAMA, "mixtral": LLAMA | {"ep"}}
MODELS |= {"nxd-core-module": LLAMA - {"cp"}, "qwen2": LLAMA, "qwen3": LLAMA}


def test_our_models_declare_what_their_layout_tests_run(everything):
    """``tests/engine/layouts/test_{gpt,hf,mistral,mixtral}_layouts.py``, the matrix (Llama), the contract
    of Llama's plugin (Qwen), and the plugins of LoRA and NxD Core."""
    found = {component.record.name: component.record for component in everything.registry.all("model")}
    assert {name: set(found[name].capabilities) for name in MODELS.keys() & found.keys()} == {
        name: MODELS[name] for name in MODELS.keys() & found.keys()
    }
    assert found.keys() <= MODELS.keys()


def test_all_our_optimizers_train_shards(everything):
    """``tests/engine/test_optimizers_sharded.py`` runs each of the core's, ``adamw_8bit`` its own tests."""
    from tests.engine.optimizer.optimizing import NAMES

    found = {component.record.name: component.record.capabilities for component in everything.registry.all("optimizer")}
    assert found == dict.fromkeys(found, frozenset({"sharded"}))
    assert found.keys() == {*NAMES, "adamw_8bit"}


def test_records_of_adapters_and_objectives_say_what_they_need(everything):
    registry = everything.registry
    for component in registry.all("adapter"):
        assert component.record.requires_of_model == {component.record.name}
    found = {component.record.name: set(component.record.requires) for component in registry.all("objective")}
    assert {name for name, needed in found.items() if needed} == found.keys() & {"distill"}
    assert found.get("distill", {"frozen_model"}) == {"frozen_model"}


def test_checking_what_an_engine_declares_imports_no_torch(good, tmp_path):
    (tmp_path / "run.yaml").write_text(
        f"{good}plugins: {{local: ['{HERE / 'parts.py'}', '{HERE / 'bare_parts.py'}']}}\n"
    )
    code = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "from nxdt_core import config\n"
        f"print(len(config.check('run.yaml', ['{TWO}', '{TP2}', 'parallel_engine.name=bare'])),"
        f" len(config.check('run.yaml', ['{TWO}', '{TP2}'])))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (out.stdout, out.stderr) == ("1 0\n", "")
