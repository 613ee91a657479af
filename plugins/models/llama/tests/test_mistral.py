"""Mistral: the same numbers as transformers' MistralForCausalLM, its configuration, and what its window costs."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from nxdt_plugin_llama.builder import MistralBuilder
from nxdt_plugin_llama.config import MistralConfig

from nxdt_core.errors.models import HFUnsupported
from nxdt_core.hf.directory import load_hf, read_hf_config, save_hf
from tests.sampling import slow_except

TOKENS = 150

# The config.json of Mistral 7B v0.1, as released, without ids of tokens.
MISTRAL_7B = {
    "architectures": ["MistralForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 32000,
}


def cases() -> list[dict]:
    """Windows of one token, of some, of a block's rows, of all but one, of all and more, and none; sizes at random."""
    drawn = random.Random(20261121)
    configs = []
    for window, tied in itertools.product((1, 7, 50, 128, TOKENS - 1, TOKENS, 4096, None), (False, True)):
        heads, width = drawn.choice((2, 4, 6)), drawn.choice((8, 16))
        configs.append(
            {
                "vocab_size": drawn.randint(50, 200),
                "hidden_size": heads * width,
                "intermediate_size": drawn.randint(20, 120),
                "num_hidden_layers": drawn.randint(1, 3),
                "num_attention_heads": heads,
                "num_key_value_heads": drawn.choice((heads, heads // 2, 1)),
                "head_dim": drawn.choice((None, 4, 24)),
                "max_position_embeddings": 256,
                "rms_norm_eps": drawn.choice((1e-5, 1e-6)),
                "tie_word_embeddings": tied,
                "rope_parameters": {"rope_type": "default", "rope_theta": drawn.choice((10_000.0, 1_000_000.0))},
                "sliding_window": window,
                "initializer_range": 0.1,
            }
        )
    return configs


EACH_WINDOW = [cases()[2 * number + number % 2] for number in range(8)]
"""Tied and untied in turn."""


def label(config: dict) -> str:
    return f"window-{config['sliding_window']}-{'tied' if config['tie_word_embeddings'] else 'untied'}"


def theirs_with(config: dict) -> torch.nn.Module:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: nothing to compare with")
    torch.manual_seed(0)
    model = transformers.MistralForCausalLM(transformers.MistralConfig(**config)).eval()
    with torch.no_grad():  # fresh norms are all ones, which would hide a swapped pair
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return model


@pytest.mark.parametrize("config", slow_except(cases(), EACH_WINDOW), ids=label)
def test_logits_and_gradients_equal_those_of_transformers(config, tmp_path):
    theirs = theirs_with(config)
    theirs.save_pretrained(tmp_path)
    builder = MistralBuilder(MistralConfig(**MistralConfig.from_hf(read_hf_config(tmp_path))))
    ours = builder.build()
    ours.load_state_dict(load_hf(tmp_path, builder), strict=not config["tie_word_embeddings"])
    ids = torch.randint(0, config["vocab_size"], (2, TOKENS))
    mine, other = ours(ids), theirs(ids, use_cache=False).logits
    assert (mine - other).abs().max() <= 1e-5
    assert other.abs().max() > 0.1
    grad = torch.randn_like(other) / other.numel() ** 0.5
    mine.backward(grad)
    other.backward(grad)
    expected = dict(theirs.named_parameters())
    for entry in builder.hf_key_map():
        for layer in range(config["num_hidden_layers"] if "*" in entry.name else 1):
            mine = ours.get_parameter(entry.name.replace("*", str(layer))).grad
            other = expected[entry.hf_names[0].replace("*", str(layer))].grad
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [7, None])
def test_a_directory_comes_back_bit_equal_through_our_model(window, tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: nothing to compare with")
    theirs = theirs_with({**cases()[0], "sliding_window": window})
    theirs.save_pretrained(tmp_path / "theirs")
    builder = MistralBuilder(MistralConfig(**MistralConfig.from_hf(read_hf_config(tmp_path / "theirs"))))
    save_hf(tmp_path / "ours", builder, load_hf(tmp_path / "theirs", builder))
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    assert type(again) is type(theirs)
    for key in ("sliding_window", "rope_parameters", "head_dim", "num_key_value_heads", "max_position_embeddings"):
        assert getattr(again.config, key) == getattr(theirs.config, key)
    ids = torch.arange(40)[None]
    assert torch.equal(again(ids).logits, theirs(ids).logits)


def test_packed_documents_equal_separate_runs():
    builder = MistralBuilder(
        MistralConfig(
            num_layers=2, hidden_size=16, ffn_hidden_size=24, num_attention_heads=2, vocab_size=50, sliding_window=6
        )
    )
    torch.manual_seed(0)
    model = builder.build()
    parts = [torch.randint(0, 50, (1, length)) for length in (5, 17, 10)]
    packed = model(
        torch.cat(parts, 1),
        torch.cat([torch.arange(part.shape[1]) for part in parts])[None],
        torch.cat([torch.full((part.shape[1],), n) for n, part in enumerate(parts)])[None],
    )
    torch.testing.assert_close(packed, torch.cat([model(part) for part in parts], 1))


def test_mistral_7b_is_read_and_has_its_released_size():
    keys = MistralConfig.from_hf(MISTRAL_7B)
    assert keys["sliding_window"] == 4096
    assert keys["rope_scaling"] is None
    with torch.device("meta"):
        model = MistralBuilder(MistralConfig(**keys)).build()
    assert sum(parameter.numel() for parameter in model.parameters()) == 7_241_732_096
    assert model.layers["31"].attention.core.semantics().window == 4096


def test_what_a_file_leaves_out_is_what_transformers_takes():
    sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
    keys = MistralConfig.from_hf({key: MISTRAL_7B[key] for key in sizes})
    assert (keys["sliding_window"], keys["num_kv_heads"], keys["max_position_embeddings"]) == (4096, 8, 131072)
    assert MistralConfig.from_hf({**MISTRAL_7B, "sliding_window": None})["sliding_window"] is None
    with pytest.raises(HFUnsupported, match="mistral"):
        MistralConfig.from_hf({**MISTRAL_7B, "attention_dropout": 0.1})


def test_flops_count_what_the_window_shows():
    sizes = {key: MISTRAL_7B[theirs] for key, theirs in (("hidden_size", "hidden_size"), ("vocab_size", "vocab_size"))}
    sizes |= {"num_layers": 32, "ffn_hidden_size": 14336, "num_attention_heads": 32, "num_kv_heads": 8}
    windowed = MistralBuilder(MistralConfig(**sizes))
    unbounded = MistralBuilder(MistralConfig(**sizes, sliding_window=None))
    assert windowed.flops_per_token(4096) == unbounded.flops_per_token(4096)
    assert windowed.flops_per_token(32768) == unbounded.flops_per_token(4096)
    assert unbounded.flops_per_token(32768) - windowed.flops_per_token(32768) == 12 * 32 * 4096 * (32768 - 4096)
