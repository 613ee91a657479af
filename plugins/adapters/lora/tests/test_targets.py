"""Which layers names mean, and what is said where they mean none."""

import pytest
import torch
from nxdt_plugin_lora.errors import LayerNotAdaptable, TargetNotFound, TargetSavedWhole
from nxdt_testing.errors import raises

from nxdt_core.engine.estimate.rank import fake_mesh
from nxdt_core.engine.layout import LayoutOptions, parallelize
from nxdt_core.protocols.mesh import MeshSizes
from nxdt_core.protocols.precision import PrecisionPolicy
from nxdt_core.train import build

LAYER = "layers.0"
LINEAR = [
    *(f"attention.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
]


def updated(run):
    return {name.removesuffix(".update.lora_B") for name in run.trained if name.endswith("lora_B")}


@pytest.mark.parametrize(
    ("names", "meant"),
    [
        (["all-linear"], LINEAR),
        (["q_proj"], ["attention.q_proj"]),
        (["attention"], LINEAR[:4]),
        (["0.mlp.up_proj"], ["mlp.up_proj"]),
        (["layers.0.*"], LINEAR),
        (["*.?_proj"], LINEAR[:4]),
        (["own"], ["mlp.down_proj"]),
        (["qkv_proj"], LINEAR[:3]),
        (["gate_up_proj", "o_proj"], ["attention.o_proj", "mlp.gate_proj", "mlp.up_proj"]),
    ],
    ids=lambda value: ",".join(value) if len(value) < 3 else "",
)
def test_names_mean_layers(start, names, meant):
    found = updated(start("llama", {"target_modules": names}))
    assert {path for path in found if path.startswith(LAYER)} == {f"{LAYER}.{path}" for path in meant}


def test_all_linear_leaves_embedding_and_head_alone(start):
    assert len(updated(start("llama", {}))) == 2 * len(LINEAR)
    assert updated(start("llama", {"target_modules": ["embed_tokens", "lm_head"]})) == {"embed_tokens", "lm_head"}


@pytest.mark.parametrize(
    ("key", "names", "near"),
    [
        ("target_modules", ["q_proj", "q_porj"], "'q_proj'"),
        ("target_modules", ["self_attn.*"], "NXDT-L001"),
        ("target_modules", ["attention_norm"], "matches no layer"),
        ("modules_to_save", ["lm_heat"], "'lm_head'"),
        ("rank_pattern", {"q_porj": 8}, "'q_proj'"),
        ("alpha_pattern", {"*.q_proj": 8}, "matches no layer with an update"),
        ("rank_pattern", {"lm_head": 8}, "NXDT-L001"),
    ],
)
def test_a_name_that_means_nothing_is_told_with_the_nearest(start, key, names, near):
    with raises(TargetNotFound) as raised:
        start("llama", {key: names})
    assert near in str(raised.value)
    assert [*names][-1] in raised.value.what()


@pytest.mark.parametrize(("whole", "left"), [("mlp", LINEAR[:4]), ("layers.1", LINEAR), ("attention", LINEAR[4:])])
def test_layers_within_modules_that_train_whole_get_no_update(start, whole, left):
    run = start("llama", {"target_modules": ["all-linear"], "modules_to_save": [whole]})
    found = {path for path in updated(run) if path.startswith(LAYER)}
    assert found == {f"{LAYER}.{path}" for path in left}
    assert not [path for path in updated(run) if f".{whole}." in f".{path}."]
    assert [name for name in run.trained if f".{whole}." in f".{name}."]


@pytest.mark.parametrize(
    ("targets", "whole", "named"),
    [
        (["all-linear", "lm_head"], ["lm_head", "norm"], "'lm_head'"),
        (["q_proj", "down_proj"], ["mlp"], "'layers.0.mlp.down_proj'"),
        (["all-linear"], ["layers"], "'layers.0.attention.q_proj'"),
    ],
)
def test_a_layer_is_not_updated_and_trained_whole(start, targets, whole, named):
    with raises(TargetSavedWhole, match="NXDT-L008") as raised:
        start("llama", {"target_modules": targets, "modules_to_save": whole})
    assert named in raised.value.what()
    assert "target_modules" in raised.value.what()
    assert "modules_to_save" in raised.value.what()


def test_the_first_pattern_that_is_the_end_of_a_path_counts(start):
    ranks = {"1.attention.q_proj": 2, "q_proj": 3, "proj": 9, "layers.0.mlp.up_proj": 5}
    with raises(TargetNotFound, match="'proj' matches no layer"):
        start("llama", {"rank_pattern": ranks})
    del ranks["proj"]
    run = start("llama", {"rank_pattern": ranks, "alpha_pattern": {"k_proj": 8, "up_proj": 10}, "lora_alpha": 12})
    updates = {path: part for path, part in run.module.named_modules() if hasattr(part, "scaling")}
    assert {path: (part.lora_B.shape[1], part.scaling) for path, part in updates.items() if "_proj" in path} == {
        f"layers.{layer}.{path}.update": {
            "attention.q_proj": ((3, 4.0), (2, 6.0))[layer],
            "attention.k_proj": (4, 2.0),
            "mlp.up_proj": ((5, 2.0), (4, 2.5))[layer],
        }.get(path, (4, 3.0))
        for layer in (0, 1)
        for path in LINEAR
    }


@pytest.mark.parametrize("targets", [["embed_tokens"], ["experts"]])
def test_pissa_is_for_linear_layers(start, targets):
    with raises(LayerNotAdaptable, match="init_lora_weights: pissa is for linear layers\\."):
        start("mixtral", {"target_modules": targets, "init_lora_weights": "pissa"})


@pytest.mark.parametrize("model", ["mixtral", "hf-mixture"])
def test_dora_is_refused_of_experts(start, model):
    with raises(LayerNotAdaptable, match="NXDT-L002"):
        start(model, {"target_modules": ["experts"], "use_dora": True})


@pytest.mark.parametrize(
    ("biases", "kinds"),
    [("none", set()), ("lora_only", {"qkv_proj"}), ("all", {"qkv_proj", "o_proj", "up_proj", "attention_norm"})],
)
def test_biases_train_as_asked_for(start, biases, kinds):
    run = start("gpt2", {"target_modules": ["qkv_proj"], "lora_bias": biases})
    found = {name.split(".")[-2] for name in run.trained if name.endswith(".bias")}
    assert found >= kinds
    assert bool(found) is bool(kinds)
    assert biases != "lora_only" or found == kinds


def test_an_update_changes_nothing_at_the_start(start):
    ids = torch.arange(24).view(2, 12)
    for model, adapter in [
        ("llama", {"target_modules": ["all-linear", "embed_tokens", "lm_head"]}),
        ("llama", {"use_dora": True}),
        ("llama", {"use_dora": True, "target_modules": ["embed_tokens", "lm_head"]}),
        ("mixtral", {"target_modules": ["all-linear"], "init_lora_weights": "gaussian"}),
        ("gpt2", {"init_lora_weights": "pissa"}),
    ]:
        with_update, without = start(model, adapter), start(model, {"enable_lora": False})
        assert without.model.added == frozenset()
        torch.testing.assert_close(with_update.module(ids), without.module(ids), rtol=1e-5, atol=1e-5)


def test_starts_are_those_of_peft(start):
    default, gaussian = (start("llama", {"init_lora_weights": kind}).trained for kind in ("default", "gaussian"))
    name = f"{LAYER}.mlp.up_proj.update.lora_A"
    assert 0.9 / 32**0.5 < float(default[name].abs().max()) <= 1 / 32**0.5
    assert 0.2 < float(gaussian[name].std()) < 0.3  # 1 / rank


def test_masters_are_kept_of_what_trains_alone(start):
    run = start("llama", {}, precision="mixed_precision")
    dtypes = {(p.requires_grad, p.dtype) for _, p in run.model.named_parameters()}
    assert dtypes == {(True, torch.float32), (False, torch.bfloat16)}


@pytest.mark.parametrize(
    ("model", "adapter"), [("llama", {}), ("llama", {"use_dora": True}), ("mixtral", {}), ("hf", {})]
)
def test_a_base_in_bfloat16_computes_what_autocast_makes_of_one_in_float32(start, model, adapter):
    kept, wide = (start(model, {"target_modules": ["all-linear"], **adapter}, precision="autocast") for _ in range(2))
    drawn = start(model, {"target_modules": ["all-linear"], **adapter}).module.state_dict()
    for name, parameter in wide.module.named_parameters():
        parameter.data = drawn[name]
    narrow = {name for name, parameter in kept.module.named_parameters() if parameter.dtype == torch.bfloat16}
    assert (narrow == {"lm_head.weight"}) is bool(adapter)  # DoRA reads the weights that it adapts
    ids = torch.arange(24).view(2, 12)
    for run in (kept, wide):
        run.shake()
        with torch.autocast("cpu", torch.bfloat16):
            run.module(ids).float().square().sum().backward()
    torch.testing.assert_close(
        {name: p.grad for name, p in kept.trained.items()},
        {name: p.grad for name, p in wide.trained.items()},
        rtol=0,
        atol=0,
    )


def test_tensor_parallel_ranks_drop_alike_what_they_hold_alike(start):
    run = start("llama", {"lora_dropout": 0.5})
    salts = []
    for rank in (0, 1):
        with fake_mesh(MeshSizes(tp=2), rank=rank) as mesh:
            adapters = build.adapters(run.config)
            laid = parallelize(run.builder, mesh, LayoutOptions(), PrecisionPolicy(name="fp32"), adapters).modules[0]
            layer = laid.get_submodule("layers.0.attention")
            salts.append([getattr(layer, name).update.dropout.salt for name in ("q_proj", "o_proj")])
    (first_whole, first_part), (second_whole, second_part) = salts
    assert first_whole == second_whole
    assert first_part != second_part
