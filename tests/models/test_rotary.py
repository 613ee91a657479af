"""Rotary embedding: what makes it one, its scalings, its gradient, and its table's precision."""

from __future__ import annotations

import math

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

from nxdt_core.models.rope_scaling import RopeScalingConfig
from nxdt_core.models.rotary import RotaryEmbedding, document_lengths, frequencies, rotate

LLAMA_31 = RopeScalingConfig(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)


def turned(x: torch.Tensor, positions: torch.Tensor, **options) -> torch.Tensor:
    return rotate(x, *RotaryEmbedding(x.shape[-1], **options)(positions))


def test_each_pair_turns_by_its_angle_as_a_complex_number():
    x = torch.randn(2, 5, 3, 8, dtype=torch.float64)
    positions = torch.tensor([0, 1, 2, 7, 100])
    rotated = turned(x, positions, theta=100.0)
    angle = positions[:, None].double() * 100.0 ** (-torch.arange(4).double() / 4)
    expected = torch.complex(*x.chunk(2, -1)) * torch.polar(torch.ones_like(angle), angle)[None, :, None]
    torch.testing.assert_close(torch.complex(*rotated.chunk(2, -1)), expected, rtol=1e-5, atol=1e-5)


def test_scores_depend_on_the_distance_alone():
    query, key = torch.randn(1, 1, 1, 16), torch.randn(1, 1, 1, 16)

    def score(i: int, j: int) -> torch.Tensor:
        return (turned(query, torch.tensor([i])) * turned(key, torch.tensor([j]))).sum()

    torch.testing.assert_close(score(3, 1), score(103, 101), rtol=1e-4, atol=1e-4)
    assert not torch.isclose(score(3, 1), score(3, 2))


def test_positions_that_restart_are_those_of_separate_sequences():
    x = torch.randn(1, 7, 2, 8)
    packed = turned(x, torch.tensor([[0, 1, 2, 0, 1, 2, 3]]))
    torch.testing.assert_close(packed[:, 3:], turned(x[:, 3:], torch.arange(4)), rtol=0, atol=0)


def test_the_gradient_is_right():
    x = torch.randn(2, 3, 2, 6, dtype=torch.float64, requires_grad=True)
    cos, sin = (table.double() for table in RotaryEmbedding(6)(torch.arange(3)))
    assert torch.autograd.gradcheck(lambda heads: rotate(heads, cos, sin), x)
    assert torch.autograd.gradgradcheck(lambda heads: rotate(heads, cos, sin), x)
    transposed = x.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.autograd.gradcheck(lambda heads: rotate(heads, cos, sin), transposed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_compiled_rotations_give_the_same_bits_without_writing_into_halves(dtype):
    """Inductor makes two kernels of what is written into a half, and keeps the whole between them."""
    graphs = []

    def keep(graph, _):
        graphs.append(graph.graph)
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    compiled = torch.compile(rotate, backend=aot_autograd(fw_compiler=keep), fullgraph=True)
    heads, grad = torch.randn(2, 2, 3, 2, 8).to(dtype).unbind()
    found = []
    for function in (rotate, compiled):
        x = heads.clone().requires_grad_()
        found.append(function(x, *RotaryEmbedding(8)(torch.arange(3))))
        found += torch.autograd.grad(found[-1], x, grad)
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])
    assert len(graphs) == 2
    assert not [node for graph in graphs for node in graph.nodes if "scatter" in node.name]


def test_rotation_keeps_the_dtype_of_the_heads():
    assert turned(torch.randn(1, 2, 1, 8, dtype=torch.bfloat16), torch.arange(2)).dtype == torch.bfloat16


def test_linear_scaling_divides_positions():
    x = torch.randn(1, 4, 1, 8)
    torch.testing.assert_close(
        turned(x, 4 * torch.arange(4), scaling=RopeScalingConfig(rope_type="linear", factor=4.0)),
        turned(x, torch.arange(4)),
    )


def test_llama_3_scaling_keeps_fast_frequencies_and_divides_slow_ones():
    plain, scaled = frequencies(128, 500_000.0), frequencies(128, 500_000.0, LLAMA_31)
    wavelength = 2 * math.pi / plain
    fast, slow = wavelength < 8192 / 4, wavelength > 8192
    torch.testing.assert_close(scaled[fast], plain[fast], rtol=1e-7, atol=0)
    torch.testing.assert_close(scaled[slow], plain[slow] / 8, rtol=1e-7, atol=0)
    between = ~fast & ~slow
    assert between.any()
    assert ((scaled < plain) & (scaled > plain / 8))[between].all()
    assert (scaled.diff() < 0).all()


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1 + 0.03 * number for number in range(48)],
    "long_factor": [1 + 1.3 * number for number in range(48)],
    "original_max_position_embeddings": 4096,
}


@pytest.mark.parametrize(
    ("rope", "width", "lengths"),
    [
        (YARN, 128, [1]),
        ({**YARN, "beta_fast": 40.0, "beta_slow": 2.0, "mscale": 0.8, "mscale_all_dim": 0.5}, 64, [1]),
        ({**YARN, "truncate": False, "attention_factor": 1.1}, 128, [1]),
        (LONGROPE, 96, [4096, 4097, 131072]),
        ({"rope_type": "dynamic", "factor": 2.0}, 128, [4095, 4096, 4097, 131072]),
    ],
    ids=["yarn", "yarn-mscale", "yarn-untruncated", "longrope", "dynamic"],
)
def test_tables_of_each_length_are_those_of_transformers(rope, width, lengths):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: nothing to compare with")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    longest, theta = 4096 if rope["rope_type"] == "dynamic" else 131072, 1_000_000.0
    sizes = {"hidden_size": width, "num_attention_heads": 1, "max_position_embeddings": longest}
    original = {"original_max_position_embeddings": 4096} if rope["rope_type"] == "dynamic" else {}
    scaling = RopeScalingConfig(
        **{key: tuple(value) if isinstance(value, list) else value for key, value in (rope | original).items()}
    )
    ours = RotaryEmbedding(width, theta=theta, scaling=scaling, max_positions=131072)
    for length in lengths:
        config = transformers.LlamaConfig(**sizes, rope_parameters={**rope, "rope_theta": theta})
        theirs = LlamaRotaryEmbedding(config)
        positions = torch.tensor([[0, 1, 77, length - 1]])
        expected = theirs(torch.empty(1), positions)
        for mine, other in zip(ours(positions), expected, strict=True):
            torch.testing.assert_close(mine[0, :, 0], other[0, :, : width // 2], rtol=1e-5, atol=length * 1.2e-7)
        torch.testing.assert_close(ours(torch.tensor([[0]]))[0][0, 0, 0], expected[0][0, 0, : width // 2])


def test_only_yarn_and_longrope_scale_queries_and_keys():
    scaling = RopeScalingConfig(rope_type="linear", factor=4.0, attention_factor=2.0)
    assert RotaryEmbedding(8, scaling=scaling)(torch.tensor([0]))[0].max() == 1


def test_each_document_has_its_own_length():
    documents = torch.tensor([[3, 3, 3, 1, 1, -1, -1], [0, 0, 0, 0, 0, 0, 0]])
    restarted = torch.tensor([[0, 1, 2, 0, 1, 0, 0], [0, 1, 2, 3, 4, 5, 6]])
    lengths = document_lengths(restarted, documents)
    assert lengths.tolist() == [[3, 3, 3, 2, 2, 1, 1], [7] * 7]
    assert document_lengths(restarted, None).tolist() == [[3], [7]]
    assert document_lengths(torch.arange(7), documents)[0].tolist() == [3, 3, 3, 5, 5, 7, 7]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_model_that_is_cast_keeps_exact_frequencies(dtype):
    rotary, positions = RotaryEmbedding(16), torch.tensor([4095])
    expected = rotary(positions)
    for mine, exact in zip(rotary.to(dtype)(positions), expected, strict=True):
        assert torch.equal(mine, exact)


def test_a_model_built_on_meta_has_its_table_after_reset_buffers():
    with torch.device("meta"):
        rotary = RotaryEmbedding(16, theta=77.0)
    assert rotary.frequency.is_meta
    rotary.to_empty(device="cpu")
    rotary.reset_buffers()
    assert torch.equal(rotary.frequency, RotaryEmbedding(16, theta=77.0).frequency)


def test_the_table_is_not_saved():
    assert RotaryEmbedding(16).state_dict() == {}
