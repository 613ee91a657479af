"""What the builder says of a model holds for the model that it builds."""

from __future__ import annotations

import pytest
import torch
from click.testing import CliRunner
from nxdt_plugin_hf.builder import HFBuilder, measure_sharding, unmatched_patterns
from nxdt_plugin_hf.command import sharding
from nxdt_plugin_hf.config import HFModelConfig

from nxdt_core.engine.engine import TorchEngine
from nxdt_core.hf.key_map import sources
from nxdt_core.models.patterns import matches
from nxdt_core.models.random.init import initialize
from nxdt_core.models.rope_scaling import older_rope
from nxdt_core.protocols.model import ModelBuilder


def test_it_is_a_builder_and_exchanges_with_hugging_face(builder):
    made = builder("qwen3")
    assert isinstance(made, ModelBuilder)


def test_keys_that_transformers_4_calls_otherwise_have_both_names(builder):
    written = builder("qwen3-moe").config_to_hf()
    assert written["num_experts"] == written["num_local_experts"]
    neox = {"model_type": "gpt_neox", "rotary_pct": 0.5, "rotary_emb_base": 5000.0, "hidden_size": 64}
    written = HFBuilder(HFModelConfig(hf_config={**neox, "num_attention_heads": 4})).config_to_hf()
    assert (written["rotary_pct"], written["rotary_emb_base"]) == (0.5, 5000.0)
    without_rotation = {"rope_parameters": {"full_attention": None, "sliding_attention": {"rope_theta": 5000.0}}}
    assert older_rope(without_rotation) == {"rope_local_base_freq": 5000.0}


def test_every_pattern_of_the_plan_matches_what_it_is_for(builder, family):
    made = builder(family)
    with torch.device("meta"):
        module = made.build()
    plan = made.plan()
    modules = dict(module.named_modules())
    parameters = dict(module.named_parameters(remove_duplicate=False))
    paths = [*plan.tensor, *plan.tensor_blocks, *plan.attention_cores, plan.recompute_layer]
    paths += [path for group in plan.recompute.values() for path in group]
    if plan.pipeline is not None:
        paths += [*plan.pipeline.first, plan.pipeline.layers, *plan.pipeline.last]
    for path in paths:
        assert any(matches(path, name) for name in modules), path
    for path in plan.norms:
        assert any(matches(path, name) for name in parameters), path
    for pair in plan.tied:
        assert parameters[pair[0]] is parameters[pair[1]]
    assert bool(plan.tied) is made.architecture.config.tie_word_embeddings
    without = family in ("olmoe", "granitemoe")  # transformers has no pp_plan for them
    assert plan.refused.keys() == ({"pp"} if without else set())
    if plan.experts.modules:
        for path in (*plan.experts.modules, *plan.experts.dispatchers, *plan.experts.routers):
            assert any(matches(path, name) for name in modules), path
        for path in plan.experts.tensor:
            assert any(matches(path, name) for name in parameters), path


def test_two_ranks_hold_half_of_every_matrix_and_all_of_other_norms_and_routers(builder, family):
    made = builder(family)
    elements = measure_sharding(made, 2, TorchEngine)
    with torch.device("meta"):
        shapes = {name: parameter.shape for name, parameter in made.build().named_parameters()}
    for name, (whole, held) in elements.items():
        alone = ".gate." in name or ".router." in name or "q_a_proj" in name or "kv_a_proj" in name
        alone |= name.endswith(("o_proj.bias", "down_proj_bias", "shared_expert_gate.weight"))
        stays = ("norm" in name and len(shapes[name]) == 1) or alone
        assert held == (whole if stays else whole // 2), name
    unmatched = unmatched_patterns(made.architecture)
    assert unmatched == (("model.layers.*.self_attn.q_b_proj",) if family == "deepseek-v2" else ())


def test_four_ranks_share_two_key_heads(builder):
    elements = measure_sharding(builder("qwen3"), 4, TorchEngine)
    whole, held = elements["model.layers.0.self_attn.k_proj.weight"]
    assert held == whole // 2
    whole, held = elements["model.layers.0.self_attn.q_proj.weight"]
    assert held == whole // 4


def test_four_ranks_share_the_norms_of_two_key_heads(builder):
    elements = measure_sharding(builder("cohere"), 4, TorchEngine)
    assert elements["model.layers.0.self_attn.q_norm.weight"] == (64, 16)
    assert elements["model.layers.0.self_attn.k_norm.weight"] == (32, 16)


def test_names_are_those_of_transformers_but_for_experts(builder, fused, written):
    made = builder(written)
    names = set(made.architecture.model_class(made.architecture.config).state_dict())
    users = {user for _, user in made.plan().tied}
    with torch.device("meta"):
        ours = {source.name: torch.empty(source.shape) for source in sources(made)}
    assert fused(ours).keys() == names - users
    if written not in ("granitemoe", "gpt-oss"):  # whose names in directories or in memory are others
        assert all(source.hf_names == (source.name,) for source in sources(made) if source.transform == "none")


def test_fresh_weights_are_spread_as_transformers_spreads_them(builder, fused, family):
    made = builder(family)
    with torch.device("meta"):
        module = made.build()
    module.to_empty(device="cpu")
    initialize(module.named_parameters(), made.init_rules(), seed=1)
    torch.manual_seed(0)
    other = made.architecture.model_class(made.architecture.config)
    expected = other.state_dict()
    for name, parameter in fused(dict(module.named_parameters())).items():
        if name.endswith(("sinks", "router.bias")):
            assert 0.02 < parameter.std() < 0.3  # of few numbers
        elif parameter.ndim == 1 or "norm" in name or name.endswith("_bias"):
            assert torch.equal(parameter, expected[name]), name
        else:
            deviations = 5 / parameter.numel() ** 0.5  # of the ratio of two deviations, each of a sample of this size
            assert parameter.std().item() == pytest.approx(expected[name].std().item(), rel=deviations), name


def test_what_a_constructor_alone_fills_with_a_number_begins_with_it():
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 48}
    made = HFBuilder(HFModelConfig(hf_config={"model_type": "apertus", "num_attention_heads": 4, **sizes}))
    with torch.device("meta"):
        module = made.build()
    module.to_empty(device="cpu")
    initialize(module.named_parameters(), made.init_rules(), seed=1)
    theirs = made.architecture.plain().model.layers[0].mlp.act_fn.state_dict()
    assert theirs.keys() == {"alpha_p", "alpha_n", "beta", "eps"}
    for name, value in theirs.items():
        assert torch.equal(module.get_parameter(f"model.layers.0.mlp.act_fn.{name}"), value), name


def test_flops_count_what_a_token_is_multiplied_with(builder):
    made = builder("qwen3", num_hidden_layers=2)  # 4 query heads and 2 key heads of 24, hidden 64, 176 between
    layer = 64 * (4 * 24 + 2 * 24 + 2 * 24) + 4 * 24 * 64 + 3 * 64 * 176
    assert made.flops_per_token(100) == 6 * (2 * layer + 272 * 64) + 12 * 2 * (4 * 24) * 100


def test_flops_count_the_experts_that_a_token_is_sent_to(builder):
    made = builder("qwen3-moe", num_hidden_layers=2)  # as above; layer 0 has 8 experts of 48 columns, 2 a token
    attention = 64 * (4 * 24 + 2 * 24 + 2 * 24) + 4 * 24 * 64
    weights = 2 * attention + (8 * 64 + 2 * 3 * 64 * 48) + 3 * 64 * 176 + 272 * 64
    assert made.flops_per_token(100) == 6 * weights + 12 * 2 * (4 * 24) * 100


def test_a_window_bounds_the_flops_of_its_layers(builder):
    made = builder("qwen2")  # two layers of four see 16 tokens
    assert made.flops_per_token(100) - made.flops_per_token(50) == 12 * 2 * 64 * 50


def test_keys_of_nxd_training_change_the_configuration(builder):
    given = builder("qwen3").config.hf_config
    made = HFBuilder(HFModelConfig(hf_config=given, num_layers=2, hidden_size=32, max_position_embeddings=64))
    with torch.device("meta"):
        model = made.build()
    assert len(model.model.layers) == 2
    assert model.lm_head.weight.shape == (272, 32)
    assert made.max_sequence_length == 64


def test_the_command_lists_what_is_cut_and_what_stays_whole():
    layout = ("trainer.devices=2", "distributed_strategy.tensor_model_parallel_size=2")
    done = CliRunner().invoke(sharding, ["recipe:hf-tiny", *layout])
    assert done.exit_code == 0, done.output
    assert done.output.startswith("Qwen3ForCausalLM over 2 tensor parallel ranks: each holds 50.2 % of all weights.\n")
    cut, whole = done.output.split("whole on each rank:")
    assert "  model.layers.*.self_attn.q_proj.weight\n" in cut
    assert "  model.layers.*.self_attn.q_norm.weight\n" in whole
