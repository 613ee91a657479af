"""The same numbers as transformers' LlamaForCausalLM from the same weights."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from nxdt_core.hf.directory import load_hf, read_hf_config, save_hf
from nxdt_core.models.random.init import initialize
from tests.sampling import slow_except

transformers = pytest.importorskip("transformers", reason="transformers is not installed: nothing to compare with")

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
PLAIN = {"rope_type": "default", "rope_theta": 10_000.0}


def cases() -> list[dict]:
    """All combinations of features, each with sizes drawn at random."""
    drawn = random.Random(20261121)
    features = itertools.product(("gqa", "mha", "mqa"), (False, True), (PLAIN, LLAMA3, LINEAR), (False, True))
    configs = []
    for attention, tied, rope, own_head_dim in features:
        heads, width = drawn.choice((2, 4, 6)), drawn.choice((8, 16))
        configs.append(
            {
                "vocab_size": drawn.randint(50, 200),
                "hidden_size": heads * width,
                "intermediate_size": drawn.randint(20, 120),
                "num_hidden_layers": drawn.randint(1, 3),
                "num_attention_heads": heads,
                "num_key_value_heads": {"gqa": heads // 2, "mha": heads, "mqa": 1}[attention],
                "head_dim": drawn.choice((4, 24, 32)) if own_head_dim else None,
                "max_position_embeddings": 256,
                "rms_norm_eps": drawn.choice((1e-5, 1e-6)),
                "tie_word_embeddings": tied,
                "rope_parameters": rope,
                "initializer_range": 0.1,
            }
        )
    return configs


PAIRS = [cases()[number] for number in (1, 4, 9, 12, 15, 20, 23, 26, 31, 34)]
"""These have each pair of features."""


def label(config: dict) -> str:
    rope = config["rope_parameters"]["rope_type"]
    heads = f"{config['num_attention_heads']}q{config['num_key_value_heads']}kv{config['head_dim'] or ''}"
    return f"{heads}-{rope}-{'tied' if config['tie_word_embeddings'] else 'untied'}"


def theirs_with(config: dict) -> torch.nn.Module:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).eval()
    with torch.no_grad():  # fresh norms are all ones, which would hide a swapped pair
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return model


@pytest.mark.parametrize("config", slow_except(cases(), PAIRS), ids=label)
def test_logits_and_gradients_equal_those_of_transformers(config, from_hf, tmp_path):
    theirs = theirs_with(config)
    theirs.save_pretrained(tmp_path)
    builder = from_hf(read_hf_config(tmp_path))
    ours = builder.build()
    ours.load_state_dict(load_hf(tmp_path, builder), strict=not config["tie_word_embeddings"])
    ids = torch.randint(0, config["vocab_size"], (2, 150))
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


def test_given_positions_count_as_in_transformers(from_hf, tmp_path):
    theirs = theirs_with(cases()[0])
    theirs.save_pretrained(tmp_path)
    builder = from_hf(read_hf_config(tmp_path))
    ours = builder.build()
    ours.load_state_dict(load_hf(tmp_path, builder))
    # Only distances matter, so these are uneven: positions that merely restart or shift would prove nothing.
    ids, positions = torch.arange(30).view(2, 15), torch.stack((3 * torch.arange(15), torch.arange(15) ** 2))
    logits = ours(ids, positions)
    # Without a mask, transformers takes every uneven step for the start of another document.
    expected = theirs(ids, attention_mask=torch.ones_like(ids), position_ids=positions, use_cache=False).logits
    assert (logits - expected).abs().max() <= 1e-5
    assert (logits - ours(ids)).abs().max() > 1e-2


@pytest.mark.parametrize("rope", [PLAIN, LLAMA3, LINEAR], ids=lambda rope: rope["rope_type"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_directory_comes_back_bit_equal_through_our_model(rope, tied, from_hf, tmp_path):
    config = {**cases()[0], "rope_parameters": rope, "tie_word_embeddings": tied}
    theirs = theirs_with(config)
    theirs.save_pretrained(tmp_path / "theirs")
    builder = from_hf(read_hf_config(tmp_path / "theirs"))
    save_hf(tmp_path / "ours", builder, load_hf(tmp_path / "theirs", builder))
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert type(again) is type(theirs)
    for key in ("rope_parameters", "head_dim", "num_key_value_heads", "rms_norm_eps", "tie_word_embeddings"):
        assert getattr(again.config, key) == getattr(theirs.config, key)
    for (name, mine), (other_name, other) in zip(again.state_dict().items(), theirs.state_dict().items(), strict=True):
        assert name == other_name
        assert torch.equal(mine, other)
    ids = torch.arange(40)[None]
    assert torch.equal(again.eval()(ids).logits, theirs(ids).logits)


def test_an_export_in_bfloat16_and_many_files_loads_in_transformers(builder, tokens, tmp_path):
    llama = builder()
    ours = llama.build()
    initialize(ours.named_parameters(), llama.init_rules(), seed=1)
    ours.to(torch.bfloat16)
    save_hf(tmp_path / "out", llama, ours.state_dict(), max_shard_bytes=20_000)
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 2
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert theirs.dtype == torch.bfloat16
    ids = tokens(1, 30)
    torch.testing.assert_close(ours.float()(ids), theirs.float()(ids, use_cache=False).logits, rtol=1e-4, atol=1e-5)


def test_a_sharded_directory_of_transformers_loads(from_hf, tmp_path):
    theirs = theirs_with({**cases()[0], "intermediate_size": 400})
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    builder = from_hf(read_hf_config(tmp_path))
    loaded = load_hf(tmp_path, builder)
    assert torch.equal(loaded["lm_head.weight"], theirs.lm_head.weight)


def test_packed_documents_equal_separate_runs_of_transformers(from_hf, tmp_path):
    theirs = theirs_with(cases()[0])
    theirs.save_pretrained(tmp_path)
    builder = from_hf(read_hf_config(tmp_path))
    ours = builder.build()
    ours.load_state_dict(load_hf(tmp_path, builder))
    parts = [torch.randint(0, 50, (1, length)) for length in (5, 17, 10)]
    logits = ours(
        torch.cat(parts, 1),
        torch.cat([torch.arange(part.shape[1]) for part in parts])[None],
        torch.cat([torch.full((part.shape[1],), n) for n, part in enumerate(parts)])[None],
    )
    separate = torch.cat([theirs(part).logits for part in parts], 1)
    assert (logits - separate).abs().max() <= 1e-5


def test_all_that_differs_where_padding_ends_texts_is_the_gradient_of_its_row(from_hf, tmp_path):
    end = 7
    config = {**cases()[0], "tie_word_embeddings": False, "eos_token_id": end, "pad_token_id": end}
    theirs = theirs_with(config)
    theirs.save_pretrained(tmp_path)
    builder = from_hf(read_hf_config(tmp_path))
    ours = builder.build()
    ours.load_state_dict(load_hf(tmp_path, builder))
    ids = torch.randint(8, config["vocab_size"], (2, 12), generator=torch.Generator().manual_seed(3))
    ids[:, 5] = end  # between two documents
    logits, expected = ours(ids), theirs(ids).logits
    assert (logits - expected).abs().max() <= 1e-5, "the forward is the same"
    for each in (logits, expected):
        torch.nn.functional.cross_entropy(each[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    found, dropped = ours.embed_tokens.weight.grad, theirs.model.embed_tokens.weight.grad
    assert (dropped[end] == 0).all(), "transformers builds the table with padding_idx"
    assert found[end].abs().max() > 1e-4
    others = torch.arange(len(found)) != end
    assert (found[others] - dropped[others]).abs().max() <= 1e-5
    assert (ours.norm.weight.grad - theirs.model.norm.weight.grad).abs().max() <= 1e-5
    assert (ours.lm_head.weight.grad - theirs.lm_head.weight.grad).abs().max() <= 1e-5
