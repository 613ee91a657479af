"""The section and its translation from and to Hugging Face."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from nxdt_plugin_mixtral.config import MixtralConfig, MoEConfig

from nxdt_core.config import load
from nxdt_core.errors import NxdtError
from nxdt_core.errors.models import HFFileDamaged, HFUnsupported

SIZES = {"num_layers": 2, "hidden_size": 48, "ffn_hidden_size": 80, "num_attention_heads": 4, "vocab_size": 96}

# The config.json of Mixtral 8x7B v0.1, as released, without ids of tokens.
MIXTRAL_8X7B = {
    "architectures": ["MixtralForCausalLM"],
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mixtral",
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 32000,
}


_STRATEGY = "distributed_strategy."


@pytest.mark.parametrize(
    ("changes", "key", "words"),
    [
        ({"hidden_size": 50}, "hidden_size", "multiple of num_attention_heads (4)"),
        ({"head_dim": 7}, "head_dim", "even"),
        ({"num_kv_heads": 3}, "num_kv_heads", "divide num_attention_heads (4)"),
        ({"rope_theta": 0.0}, "rope_theta", "above 0"),
        ({"moe": MoEConfig(top_k=9)}, "moe.top_k", "exceeds num_experts (8)"),
        ({"moe": MoEConfig(dropless=True, capacity_factor=1.5)}, "moe.dropless", "capacity_factor 1.5 drops"),
        (
            {"moe": MoEConfig(routing_algorithm="sinkhorn", normalize_top_k_affinities=False)},
            "moe.top_k",
            "one expert, not 2",
        ),
        (
            {"moe": MoEConfig(routing_algorithm="sinkhorn", top_k=1)},
            "moe.normalize_top_k_affinities",
            "must be false",
        ),
        ({"moe": MoEConfig(dropout=1.0)}, "moe.dropout", "below 1"),
        ({"moe": MoEConfig(glu_mlp=False)}, "moe.glu_mlp", "must be true"),
        ({"moe": MoEConfig(frequency=3)}, "moe.frequency", "none of 2 layers"),
    ],
)
def test_what_cannot_work_is_told_by_key(changes, key, words):
    problems = dict(MixtralConfig(**{**SIZES, **changes}).check())
    assert list(problems) == [key]
    assert words in problems[key]


@pytest.mark.parametrize(
    ("factor", "capacity"), [(None, None), (0.0, None), (-1.0, None), (1.0, 1.0), (2.5, 2.5)], ids=str
)
def test_a_factor_that_is_not_above_0_drops_nothing(factor, capacity):
    moe = MoEConfig(capacity_factor=factor, dropless=capacity is None)
    assert moe.capacity == capacity
    assert not list(moe.check())


def test_one_layer_in_so_many_has_experts():
    layers = {
        n: MixtralConfig(**{**SIZES, "num_layers": 6}, moe=MoEConfig(frequency=n)).expert_layers for n in (1, 2, 3)
    }
    assert layers == {1: {0, 1, 2, 3, 4, 5}, 2: {1, 3, 5}, 3: {2, 5}}


def test_mixtral_8x7b_is_read():
    assert MixtralConfig.from_hf(MIXTRAL_8X7B) == {
        "num_layers": 32,
        "hidden_size": 4096,
        "ffn_hidden_size": 14336,
        "num_attention_heads": 32,
        "num_kv_heads": 8,
        "head_dim": None,
        "vocab_size": 32000,
        "max_position_embeddings": 32768,
        "sliding_window": None,
        "rope_theta": 1_000_000.0,
        "rope_scaling": None,
        "layernorm_epsilon": 1e-5,
        "share_embeddings_and_output_weights": False,
        "init_method_std": 0.02,
        "use_scaled_init_method": False,
        "moe.num_experts": 8,
        "moe.top_k": 2,
        "moe.router_aux_loss_coef": 0.02,
    }


def test_what_a_file_leaves_out_is_what_transformers_takes():
    sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
    keys = MixtralConfig.from_hf({key: MIXTRAL_8X7B[key] for key in sizes})
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: nothing to compare with")
    theirs = transformers.MixtralConfig()
    assert keys["num_kv_heads"] == theirs.num_key_value_heads
    assert keys["max_position_embeddings"] == theirs.max_position_embeddings
    assert keys["layernorm_epsilon"] == theirs.rms_norm_eps
    assert keys["rope_theta"] == theirs.rope_parameters["rope_theta"]
    assert keys["moe.num_experts"] == theirs.num_local_experts
    assert keys["moe.top_k"] == theirs.num_experts_per_tok
    assert keys["moe.router_aux_loss_coef"] == theirs.router_aux_loss_coef


def test_router_keys_of_the_run_win_and_the_file_gives_the_others(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**MIXTRAL_8X7B, "num_local_experts": 6, "num_experts_per_tok": 3}))
    config = load(
        {
            "name": "read",
            "trainer": {"max_steps": 1},
            "data": {"name": "none", "global_batch_size": 1, "seq_length": 1},
            "model": {
                "name": "mixtral",
                "model_config": str(file),
                "num_layers": 4,
                "moe": {"top_k": 1, "capacity_factor": 1.25},
                "optim": {"lr": 0.0},
            },
        }
    )
    model = config.selected("model").config
    assert (model.num_layers, model.hidden_size) == (4, 4096)
    assert model.moe == MoEConfig(num_experts=6, top_k=1, capacity_factor=1.25, router_aux_loss_coef=0.02)


@pytest.mark.parametrize(
    "feature",
    [
        {"hidden_act": "gelu"},
        {"attention_dropout": 0.1},
        {"router_jitter_noise": 0.1},
        {"quantization_config": {"quant_method": "fp8"}},
        {"rope_scaling": {"rope_type": "proportional", "factor": 2.0}},
        {"partial_rotary_factor": 0.5},
    ],
    ids=str,
)
def test_features_that_are_not_implemented_are_refused(feature):
    with pytest.raises(HFUnsupported) as caught:
        MixtralConfig.from_hf({**MIXTRAL_8X7B, **feature})
    assert caught.value.code == "NXDT-M012"


def test_a_file_without_a_size_is_refused():
    with pytest.raises(HFFileDamaged, match="vocab_size"):
        MixtralConfig.from_hf({key: value for key, value in MIXTRAL_8X7B.items() if key != "vocab_size"})


def test_the_section_and_the_entry_module_need_no_torch():
    program = "import sys; sys.modules['torch'] = sys.modules['numpy'] = None; import nxdt_plugin_mixtral.config"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_sinkhorn_is_refused_where_context_parallelism_divides_the_micro_batch():
    keys = ["model.moe={routing_algorithm: sinkhorn, top_k: 1, normalize_top_k_affinities: false}"]
    assert load("recipe:mixtral-tiny", keys).selected("model").config.moe.routing_algorithm == "sinkhorn"
    cut = [*keys, "trainer.devices=2", "distributed_strategy.context_parallel_size=2"]
    with pytest.raises(NxdtError, match="sinkhorn balances whole micro-batches"):
        load("recipe:mixtral-tiny", cut)


@pytest.mark.parametrize(
    "setting",
    [
        ("model.compile=true",),
        ("trainer.devices=2", f"{_STRATEGY}pipeline_model_parallel_size=2", f"{_STRATEGY}pipeline_schedule=zbv"),
    ],
    ids=["compile", "zbv"],
)
def test_a_pooled_loss_is_refused_where_backward_does_not_know_all_layers(setting):
    load("recipe:mixtral-tiny", setting)
    with pytest.raises(NxdtError, match="needs the assignments of all layers"):
        load("recipe:mixtral-tiny", [*setting, "model.moe.pool_router_aux_loss=true"])


@pytest.mark.parametrize(
    ("moe", "notes"),
    [
        ("capacity_factor: 1.0", []),
        (
            "dropless: true",
            [
                "distributed_strategy.token_shuffle_group_size: tokens travel for nothing, since"
                " model.moe.capacity_factor bounds no expert"
            ],
        ),
    ],
)
def test_shuffling_without_capacity_is_noted(moe, notes):
    keys = ["trainer.devices=2", "distributed_strategy.token_shuffle_group_size=2", f"model.moe={{{moe}}}"]
    assert [note for note in load("recipe:mixtral-tiny", keys).notes if "token" in note] == notes
