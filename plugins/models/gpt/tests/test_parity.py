"""The same numbers as transformers' GPT-2 and GPT-NeoX from the same weights."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from nxdt_plugin_gpt.builder import GPTBuilder
from nxdt_plugin_gpt.config import GPTConfig
from safetensors.torch import load_file, save_file

from nxdt_core.hf.directory import load_hf, read_hf_config, save_hf
from nxdt_core.hf.key_map import sources
from nxdt_core.models.random.init import initialize
from tests.sampling import slow_except

transformers = pytest.importorskip("transformers", reason="transformers is not installed: nothing to compare with")

SPECIAL = {"bos_token_id": 0, "eos_token_id": 0}


def gpt2_cases() -> list[dict]:
    drawn = random.Random(20261121)
    cases = []
    for activation, tied, inner in itertools.product(("gelu_new", "gelu"), (True, False), (None, 52)):
        heads, width = drawn.choice((1, 2, 4, 6)), drawn.choice((8, 9, 16))
        cases.append(
            {
                "model_type": "gpt2",
                "vocab_size": drawn.randint(50, 200),
                "n_positions": 160,
                "n_embd": heads * width,
                "n_layer": drawn.randint(1, 3),
                "n_head": heads,
                "n_inner": inner,
                "activation_function": activation,
                "layer_norm_epsilon": drawn.choice((1e-5, 1e-6)),
                "tie_word_embeddings": tied,
                "initializer_range": 0.1,
                **SPECIAL,
            }
        )
    return cases


def neox_cases() -> list[dict]:
    drawn = random.Random(20261122)
    cases = []
    for parallel, tied, percentage, linear in itertools.product(
        (True, False), (True, False), (0.25, 0.5, 1.0), (False, True)
    ):
        heads, width = drawn.choice((1, 2, 4, 6)), drawn.choice((8, 16, 24))
        rope = {"rope_type": "linear", "factor": 4.0} if linear else {"rope_type": "default"}
        cases.append(
            {
                "model_type": "gpt_neox",
                "vocab_size": drawn.randint(50, 200),
                "max_position_embeddings": 160,
                "hidden_size": heads * width,
                "num_hidden_layers": drawn.randint(1, 3),
                "num_attention_heads": heads,
                "intermediate_size": drawn.randint(20, 120),
                "hidden_act": drawn.choice(("gelu", "gelu_new")),
                "layer_norm_eps": drawn.choice((1e-5, 1e-6)),
                "use_parallel_residual": parallel,
                "tie_word_embeddings": tied,
                "rope_parameters": {
                    **rope,
                    "rope_theta": drawn.choice((10_000.0, 25_000.0)),
                    "partial_rotary_factor": percentage,
                },
                "initializer_range": 0.1,
                **SPECIAL,
            }
        )
    return cases


def scaled_cases() -> list[dict]:
    """With each other scaling of the frequencies, of 8 of 16 channels."""
    original = {"original_max_position_embeddings": 64}
    ropes = (
        {"rope_type": "yarn", "factor": 4.0, **original},
        {"rope_type": "dynamic", "factor": 3.0},
        {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 5.0, 9.0], **original},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **original},
    )
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 64}
    both = {"rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
    return [{**neox_cases()[0], **sizes, "rope_parameters": {**rope, **both}} for rope in ropes]


PAIRS = [
    *scaled_cases(),
    *(gpt2_cases()[number] for number in (1, 2, 4, 7)),
    *(neox_cases()[number] for number in (1, 5, 8, 12, 15, 19, 22)),
]
"""These have each pair of features."""


def label(config: dict) -> str:
    features = [config["model_type"], "tied" if config["tie_word_embeddings"] else "untied"]
    if config["model_type"] == "gpt2":
        return "-".join([*features, config["activation_function"], str(config["n_inner"])])
    rope = config["rope_parameters"]
    block = "parallel" if config["use_parallel_residual"] else "sequential"
    return "-".join([*features, block, rope["rope_type"], str(rope["partial_rotary_factor"])])


def theirs_with(config: dict) -> torch.nn.Module:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config)).eval()
    with torch.no_grad():  # fresh norms and biases are all alike, which would hide swapped ones
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.uniform_(-0.5, 0.5)
            elif parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)
    return model


def both(config: dict, from_hf, tmp_path):
    """Their model, our builder of it, and our model with the same weights."""
    theirs = theirs_with(config)
    theirs.save_pretrained(tmp_path)
    builder = from_hf(read_hf_config(tmp_path))
    ours = builder.build().eval()
    ours.load_state_dict(load_hf(tmp_path, builder), strict=not config["tie_word_embeddings"])
    return theirs, builder, ours


@pytest.mark.parametrize("config", slow_except([*gpt2_cases(), *neox_cases(), *scaled_cases()], PAIRS), ids=label)
def test_logits_and_gradients_equal_those_of_transformers(config, from_hf, tmp_path):
    theirs, builder, ours = both(config, from_hf, tmp_path)
    ids = torch.randint(0, config["vocab_size"], (2, 150))
    mine, other = ours(ids), theirs(ids, use_cache=False).logits
    assert (mine - other).abs().max() <= 1e-5
    assert other.abs().max() > 0.1
    grad = torch.randn_like(other) / other.numel() ** 0.5
    mine.backward(grad)
    other.backward(grad)
    expected = dict(theirs.named_parameters())
    renamed = {"embed_out.weight": "lm_head.weight"}  # in the files of GPT-NeoX, and in the module
    for source in sources(builder):
        (name,) = source.hf_names
        wanted = source.read(lambda name: expected[renamed.get(name, name)].grad)
        torch.testing.assert_close(ours.get_parameter(source.name).grad, wanted, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("config", [gpt2_cases()[0], neox_cases()[0]], ids=label)
def test_packed_documents_equal_separate_runs_of_transformers(config, from_hf, tmp_path):
    theirs, _, ours = both(config, from_hf, tmp_path)
    parts = [torch.randint(0, 50, (1, length)) for length in (5, 17, 10)]
    logits = ours(
        torch.cat(parts, 1),
        torch.cat([torch.arange(part.shape[1]) for part in parts])[None],
        torch.cat([torch.full((part.shape[1],), n) for n, part in enumerate(parts)])[None],
    )
    separate = torch.cat([theirs(part).logits for part in parts], 1)
    assert (logits - separate).abs().max() <= 1e-5


@pytest.mark.parametrize("config", [*gpt2_cases()[:3], *neox_cases()[::5], *scaled_cases()], ids=label)
def test_a_directory_comes_back_bit_equal_through_our_model(config, from_hf, tmp_path):
    theirs, builder, ours = both(config, from_hf, tmp_path / "theirs")
    save_hf(tmp_path / "ours", builder, ours.state_dict())
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert type(again) is type(theirs)
    for (name, mine), (other_name, other) in zip(again.state_dict().items(), theirs.state_dict().items(), strict=True):
        assert name == other_name
        assert torch.equal(mine, other)
    ids = torch.arange(40)[None]
    assert again.config.max_position_embeddings == theirs.config.max_position_embeddings
    mine, other = (getattr(config, "rope_parameters", None) or {} for config in (again.config, theirs.config))
    assert {
        key: value for key, value in mine.items() if key != "type"
    } == other  # also spelt as transformers 4 reads it
    assert torch.equal(again.eval()(ids).logits, theirs(ids).logits)
    assert again.generate(ids[:, :3], max_new_tokens=4, do_sample=False).shape == (1, 7)


@pytest.mark.parametrize(
    "changes",
    [
        {"activation": "gelu_tanh"},
        {"position_embedding_type": "rope", "rotary_percentage": 0.5, "transformer_block_type": "gpt_j"},
    ],
    ids=["gpt2", "neox"],
)
def test_a_model_of_ours_goes_out_without_the_rows_that_fill_its_vocabulary_up(changes, builder, tokens, tmp_path):
    gpt = builder(**changes)
    ours = gpt.build()
    initialize(ours.named_parameters(), gpt.init_rules(), seed=1)
    save_hf(tmp_path / "out", gpt, ours.state_dict())
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert (theirs.config.vocab_size, theirs.get_input_embeddings().num_embeddings, gpt.vocab_size) == (93, 93, 96)
    ids = tokens(1, 30)
    assert (ours(ids)[..., :93] - theirs(ids, use_cache=False).logits).abs().max() <= 1e-5


@pytest.mark.parametrize("config", [gpt2_cases()[2], neox_cases()[-1]], ids=label)
def test_rows_that_fill_a_vocabulary_up_hardly_change_a_model_that_comes_in(config, tmp_path):
    theirs = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config)).eval()
    final_norm = [part for part in theirs.modules() if isinstance(part, torch.nn.LayerNorm)][-1]
    with torch.no_grad():  # logits far below zero, as those of trained models
        final_norm.bias.normal_()
        theirs.get_output_embeddings().weight.sub_(final_norm.bias)
    theirs.save_pretrained(tmp_path)
    settings = {**GPTConfig.from_hf(read_hf_config(tmp_path)), "make_vocab_size_divisible_by": 128}
    gpt = GPTBuilder(GPTConfig(**settings))
    ours = gpt.build().eval()
    ours.load_state_dict(load_hf(tmp_path, gpt), strict=False)
    ids, count = torch.randint(0, 50, (2, 40)), config["vocab_size"]
    mine, other = ours(ids), theirs(ids, use_cache=False).logits
    assert mine.shape[-1] % 128 == 0 < mine.shape[-1] - count
    assert (mine[..., :count] - other).abs().max() <= 1e-4
    assert other.max() < -1
    more = mine.logsumexp(-1) - other.logsumexp(-1)
    assert 0 <= more.min() <= more.max() <= math.log(mine.shape[-1] / count) + 1e-4


@pytest.mark.parametrize("config", [gpt2_cases()[0], neox_cases()[2]], ids=label)
def test_a_directory_of_the_base_model_alone_is_read(config, from_hf, tmp_path):
    """The released GPT-2 is one, with masks of an older version beside the weights."""
    theirs = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config)).eval()
    theirs.base_model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    mask = {"gpt2": "h.0.attn.bias", "gpt_neox": "layers.0.attention.bias"}[config["model_type"]]
    save_file({**weights, mask: torch.ones(1, 1, 8, 8)}, tmp_path / "model.safetensors")
    assert not any(name.startswith(theirs.base_model_prefix) for name in weights)
    gpt = from_hf(read_hf_config(tmp_path))
    ours = gpt.build().eval()
    ours.load_state_dict(load_hf(tmp_path, gpt), strict=False)
    ids = torch.arange(40)[None]
    assert (ours(ids) - theirs(ids, use_cache=False).logits).abs().max() <= 1e-5
