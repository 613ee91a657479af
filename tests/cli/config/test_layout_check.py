"""``nxdt config check`` and ``nxdt train`` try the layout of a model whose plan comes from elsewhere."""

from __future__ import annotations

import json
import sys

import pytest
from nxdt_testing.ranks import RankPool, RanksFailed

from nxdt_core.cli import main
from tests.sampling import slow

COHERE = {
    "model_type": "cohere",
    "use_qk_norm": True,
    "vocab_size": 272,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
FORGETFUL = """
from dataclasses import replace

from nxdt_core.api import ModelComponent, hookimpl


@hookimpl
def nxdt_models():
    return [
        ModelComponent(
            name="forgetful",
            target="forgetful:Forgetful",
            config="nxdt_plugin_hf.config:HFModelConfig",
            summary="a plan that overlooks norms of heads",
            capabilities=frozenset({"tp"}),
            tried_before_launch=True,
        )
    ]


def __getattr__(name):
    from nxdt_plugin_hf.builder import HFBuilder

    class Forgetful(HFBuilder):
        def plan(self):
            plan = super().plan()
            return replace(plan, tensor={path: style for path, style in plan.tensor.items() if style != "heads"})

    if name != "Forgetful":
        raise AttributeError(name)
    return Forgetful
"""
TWO = ("trainer.devices=2", "distributed_strategy.tensor_model_parallel_size=2")


@pytest.fixture
def words(work):
    """``words(name)``: a run of the small Cohere by the builder ``name``."""
    (work / "model").mkdir()
    (work / "model/config.json").write_text(json.dumps({**COHERE, "architectures": ["CohereForCausalLM"]}))
    (work / "forgetful.py").write_text(FORGETFUL)
    run = ("recipe:hf-tiny", "model.model_config=model", "trainer.accelerator=cpu", "plugins.local=[./forgetful.py]")
    return lambda name: (*run, f"model.name={name}")


def test_a_plan_that_overlooks_a_parameter_is_found_before_launch(nxdt, words):
    for command in (("config", "check"), ("train",), ("plan",)):
        done = nxdt(*command, *words("forgetful"), *TWO, fork=True)  # whose path has the directory
        assert done.returncode == 2, done.stderr
        assert "Traceback" not in done.stderr
        assert "[NXDT-P071] CohereForCausalLM, the model 'forgetful:forgetful' (local), cannot be" in done.stderr
        assert "tensor_model_parallel_size=2: 'model.layers.0.self_attn.q_norm' fails on its shard" in done.stderr
        assert (
            "A rank holds weight [4, 8]. The plan's entry is tensor_blocks 'model.layers.*.self_attn'." in done.stderr
        )
    assert nxdt("config", "check", *words("forgetful")).returncode == 0, "one process shards nothing"


def test_the_same_model_with_its_norms_in_the_plan_is_accepted(nxdt, words):
    done = nxdt("config", "check", *words("hf"), *TWO)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("ok: ")


def test_a_model_that_cannot_be_built_is_found_before_launch(nxdt, words):
    done = nxdt("config", "check", *words("hf"), "model.hf_config.model_type=mamba", *TWO)
    assert done.returncode == 2
    assert "[NXDT-M08" in done.stderr
    done = nxdt("config", "check", "recipe:hf-tiny", "model.hf_config.model_type=gpt2", *TWO)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_a_model_with_a_plan_of_its_own_is_checked_without_torch(nxdt):
    done = nxdt("config", "check", "recipe:llama-tiny", *TWO, without=("torch", "numpy", "transformers"))
    assert done.returncode == 0, done.stderr


SWAPPED = """
from nxdt_core.api import ModelComponent, hookimpl


@hookimpl
def nxdt_models():
    return [
        ModelComponent(
            name="swapped",
            target="swapped:Swapped",
            config="nxdt_plugin_llama.config:LlamaConfig",
            capabilities=frozenset({"tp", "pp"}),
        )
    ]


def __getattr__(name):
    from dataclasses import replace

    from nxdt_plugin_llama.builder import LlamaBuilder

    class Swapped(LlamaBuilder):
        def plan(self):
            plan = super().plan()
            others = {"column": "row", "row": "column"}
            mlp = {path: others[style] for path, style in plan.tensor.items() if ".mlp." in path}
            return replace(plan, tensor={**plan.tensor, **mlp})

    if name != "Swapped":
        raise AttributeError(name)
    return Swapped
"""


@pytest.mark.parametrize("command", [("config", "check"), slow(("train",)), slow(("plan",))], ids=" ".join)
def test_column_and_row_that_are_swapped_are_found_by_default_and_named_with_their_plugin(nxdt, work, command):
    """``test_a_plan_that_overlooks_a_parameter_is_found_before_launch`` shows that all three try the layout."""
    (work / "swapped.py").write_text(SWAPPED)
    run = ("recipe:llama-tiny", "plugins.local=[./swapped.py]", "model.name=swapped", "trainer.accelerator=cpu")
    done = nxdt(*command, *run, *TWO, fork=True)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert "the model 'swapped:swapped' (local), cannot be computed with" in done.stderr
    assert "tensor_model_parallel_size=2: 'layers.0.mlp." in done.stderr
    assert "The plan's entry is tensor 'layers.*.mlp." in done.stderr
    assert nxdt("config", "check", *run, "trainer.devices=2").returncode == 0, "weights are not sharded"


def train_as_a_rank(directory, arguments):
    sys.path.insert(0, directory)
    return main(["train", *arguments])


@pytest.mark.slow
def test_ranks_that_another_launcher_started_name_the_plan_in_the_first_step(work):
    (work / "swapped.py").write_text(SWAPPED)
    run = ("recipe:llama-tiny", f"plugins.local=[{work}/swapped.py]", "model.name=swapped", "trainer.accelerator=cpu")
    with pytest.raises(RanksFailed, match="died with exit code 2") as raised:
        RankPool(2).run(train_as_a_rank, str(work), (*run, *TWO, f"exp_manager.exp_dir={work}"))
    assert "[NXDT-P071]" in str(raised.value)
    assert "The plan's entry is tensor 'layers.*.mlp." in str(raised.value)


Z_LOSS = """
from nxdt_core.api import Component, hookimpl
from nxdt_core.models.loss import cross_entropies, log_partition
from nxdt_core.protocols.objective import Objective, ObjectiveOutput


class ZLoss(Objective):
    def __init__(self, config):
        pass

    def weight(self, batch):
        return batch.weight()

    def __call__(self, logits, batch):
        losses = cross_entropies(logits, batch.labels) + 1e-4 * self.partition(logits).square()
        return ObjectiveOutput(loss_sum=(losses * (batch.labels != -100)).sum(), weight=batch.weight())

    def partition(self, logits):
        return log_partition(logits)


class OfTheLogits(ZLoss):
    def partition(self, logits):
        return logits.logsumexp(-1)


@hookimpl
def nxdt_objectives():
    return [Component(name=name, target=f"{__name__}:{name}") for name in ("ZLoss", "OfTheLogits")]
"""


def test_an_objective_of_a_plugin_is_tried_where_logits_are_not_whole(nxdt, work):
    (work / "z_loss.py").write_text(Z_LOSS)
    chunks = "model.loss_chunk_tokens=64"
    for name, layout, code in (
        ("OfTheLogits", TWO, "NXDT-M093"),
        ("OfTheLogits", (chunks,), "NXDT-M092"),
        ("OfTheLogits", ("trainer.devices=2",), ""),
        ("ZLoss", TWO, ""),
        ("ZLoss", (chunks,), "NXDT-M092"),
    ):
        run = ("recipe:llama-tiny", "plugins.local=[./z_loss.py]", f"objective.name={name}", "trainer.accelerator=cpu")
        done = nxdt("config", "check", *run, *layout)
        assert (done.returncode, f"[{code}]" in done.stderr) == ((2, True) if code else (0, False)), done.stderr
