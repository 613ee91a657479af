"""Initial weights: the same for every shard, distributed as the rules say, unrelated between names and seeds."""

from __future__ import annotations

import itertools
import math
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nxdt_testing.errors import raises
from torch.overrides import TorchFunctionMode

from nxdt_core.errors.models import NoInitRule
from nxdt_core.models.random import init
from nxdt_core.models.random.init import draw, fill, initialize
from nxdt_core.protocols.plan import InitRule

STANDARD = InitRule(pattern="*", distribution="normal", mean=0.0, std=1.0)
SAMPLES = 1 << 20


def sample(rule: InitRule = STANDARD, name: str = "w", seed: int = 1, count: int = SAMPLES) -> torch.Tensor:
    return draw((count,), rule, name=name, seed=seed, dtype=torch.float64)


@pytest.fixture(scope="module")
def many() -> torch.Tensor:
    """Numbers that several tests look at."""
    return sample()


def test_the_first_values_are_pinned():
    # A change here changes every run that anybody has made: it must be meant.
    values = draw((2, 3), STANDARD, name="layers.0.mlp.down_proj.weight", seed=1234, dtype=torch.float64)
    expected = torch.tensor(
        [
            0.16787354158456516,
            1.7591928229190887,
            0.515123387241801,
            0.31771295305287617,
            0.05733781053188268,
            0.32008756297240587,
        ],
        dtype=torch.float64,
    )
    torch.testing.assert_close(values.flatten(), expected, rtol=1e-14, atol=0)


@st.composite
def blocks(draw_from):
    shape = draw_from(st.lists(st.integers(1, 7), max_size=4))
    starts = [draw_from(st.integers(0, n)) for n in shape]
    sizes = [draw_from(st.integers(0, n - o)) for n, o in zip(shape, starts, strict=True)]
    return shape, starts, sizes


@settings(max_examples=200, deadline=None)
@given(
    blocks(), st.sampled_from(["normal", "truncated_normal", "uniform", "constant"]), st.sampled_from([1, 5, 1 << 23])
)
def test_any_block_is_bit_equal_to_the_same_block_of_the_whole(block, distribution, chunk):
    shape, starts, sizes = block
    rule = InitRule(pattern="*", distribution=distribution, mean=0.5)
    whole = draw(shape, rule, name="w", seed=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(init, "_TILE_ON_HOST", chunk)
        part = draw(shape, rule, name="w", seed=3, offsets=starts, local_shape=sizes)
    assert torch.equal(part, whole[tuple(slice(o, o + n) for o, n in zip(starts, sizes, strict=True))])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("parts", [2, 3, 7])
def test_large_parameters_cut_by_rows_or_columns_join_to_the_whole(dtype, parts):
    shape = (301, 503)  # neither divides by anything; several chunks
    whole = draw(shape, STANDARD, name="w", seed=1, dtype=dtype)
    for dim in (0, 1):
        bounds = [shape[dim] * p // parts for p in range(parts + 1)]
        pieces = []
        for low, high in itertools.pairwise(bounds):
            offsets, local = [0, 0], list(shape)
            offsets[dim], local[dim] = low, high - low
            pieces.append(draw(shape, STANDARD, name="w", seed=1, dtype=dtype, offsets=offsets, local_shape=local))
        assert torch.equal(torch.cat(pieces, dim), whole)


def test_lower_precision_is_the_rounded_same_draw():
    wide = draw((1000,), STANDARD, name="w", seed=1, dtype=torch.float64)
    assert torch.equal(draw((1000,), STANDARD, name="w", seed=1, dtype=torch.float32), wide.float())
    assert torch.equal(draw((1000,), STANDARD, name="w", seed=1, dtype=torch.bfloat16), wide.float().bfloat16())


def test_threads_do_not_change_a_draw():
    threads = torch.get_num_threads()
    one = sample(count=200_000)
    torch.set_num_threads(threads + 1)
    try:
        assert torch.equal(sample(count=200_000), one)
        torch.set_num_threads(1)
        assert torch.equal(sample(count=200_000), one)
    finally:
        torch.set_num_threads(threads)


class Calls(TorchFunctionMode):
    """Counts the calls of torch that a device context would see."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("threads", [1, 2])
def test_a_function_mode_sees_no_call_for_each_tile(monkeypatch, threads):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(init, "_TILE_ON_HOST", 10)
    sample(count=1)  # builds the table of quantiles
    seen = []
    for count in (10, 1000):
        with Calls() as calls:
            sample(count=count)
        seen.append(calls.count)
    assert seen[0] == seen[1]


@pytest.mark.parametrize("mode", [nullcontext, torch.inference_mode])
@pytest.mark.parametrize("part", [(slice(1, 5),), (slice(None), slice(3, 8))], ids=["rows", "columns"])
def test_a_block_is_filled_in_place_and_nothing_around_it(monkeypatch, mode, part):
    monkeypatch.setattr(init, "_TILE_ON_HOST", 3)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    with mode():
        whole = torch.zeros(6, 9)
        block = whole[part]
        fill(block, STANDARD, name="w", seed=1, shape=(20, 30), offsets=(7, 11))
        expected = draw((20, 30), STANDARD, name="w", seed=1, offsets=(7, 11), local_shape=block.shape)
        assert torch.equal(block, expected)
        assert whole.count_nonzero() == block.numel()


def test_a_parameter_that_requires_a_gradient_is_filled(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    parameter = torch.nn.Parameter(torch.zeros(200, 300))
    fill(parameter, STANDARD, name="w", seed=1)
    assert torch.equal(parameter, draw((200, 300), STANDARD, name="w", seed=1))


def test_normal_numbers_have_the_moments_of_a_normal_distribution():
    x = sample()
    assert abs(x.mean()) < 5 / math.sqrt(SAMPLES)
    assert abs(x.std() - 1) < 5 / math.sqrt(2 * SAMPLES)
    assert abs((x**3).mean()) < 5 * math.sqrt(15 / SAMPLES)
    assert abs((x**4).mean() - 3) < 5 * math.sqrt(96 / SAMPLES)


@pytest.mark.parametrize("rule", [STANDARD, InitRule(pattern="*", distribution="normal", mean=0.3, std=0.02)])
def test_normal_numbers_follow_the_distribution_function(rule):
    x = (sample(rule) - rule.mean) / rule.std
    quantiles = torch.linspace(0.001, 0.999, 99, dtype=torch.float64)
    below = torch.tensor([(x < torch.special.ndtri(q)).double().mean() for q in quantiles])
    # Dvoretzky-Kiefer-Wolfowitz: a distance of 2.5 / sqrt(n) has probability 8e-6.
    assert (below - quantiles).abs().max() < 2.5 / math.sqrt(SAMPLES)


def test_truncated_normal_numbers_end_at_the_cut_and_keep_their_shape():
    rule = InitRule(pattern="*", distribution="truncated_normal", std=0.5, truncate_at=2.0)
    x = sample(rule) / 0.5
    assert x.abs().max() <= 2.0
    assert x.abs().max() > 1.999
    density, mass = math.exp(-2.0) / math.sqrt(2 * math.pi), math.erf(2 / math.sqrt(2))
    assert abs(x.var() - (1 - 4 * density / mass)) < 0.005
    assert abs(x.mean()) < 0.005


def test_uniform_numbers_fill_their_interval_evenly():
    rule = InitRule(pattern="*", distribution="uniform", mean=1.0, std=0.25)
    x = sample(rule)
    assert x.min() > 0.75
    assert x.max() < 1.25
    counts = torch.histc(x, bins=64, min=0.75, max=1.25)
    chi_square = ((counts - SAMPLES / 64) ** 2 / (SAMPLES / 64)).sum()
    assert chi_square < 63 + 5 * math.sqrt(2 * 63)


def correlation(x: torch.Tensor, y: torch.Tensor) -> float:
    return float(torch.corrcoef(torch.stack((x, y)))[0, 1])


@pytest.mark.parametrize("lag", [1, 2, 3, 64, 4096, 65536])
def test_neighbours_in_a_parameter_are_unrelated(many, lag):
    x = many
    assert abs(correlation(x[:-lag], x[lag:])) < 5 / math.sqrt(SAMPLES)
    assert abs(correlation(x[:-lag] ** 2, x[lag:] ** 2)) < 5 / math.sqrt(SAMPLES)


@pytest.mark.parametrize(
    "other",
    [{"name": "v"}, {"name": "layers.1.w"}, {"name": "w "}, {"seed": 2}, {"seed": 1001}, {"seed": 1 + 2**32}],
)
def test_other_names_and_seeds_give_unrelated_numbers(many, other):
    x, y = many, sample(**other)
    assert abs(correlation(x, y)) < 5 / math.sqrt(SAMPLES)
    for lag in (1, 17, 1024):
        assert abs(correlation(x[lag:], y[:-lag])) < 5 / math.sqrt(SAMPLES)
    assert not torch.isin(x[:50_000], y).any()


def test_layers_of_one_model_are_unrelated_to_each_other():
    layers = torch.stack([sample(name=f"layers.{n}.weight", count=4096) for n in range(64)])
    matrix = torch.corrcoef(layers) - torch.eye(64)
    assert matrix.abs().max() < 6 / math.sqrt(4096)


def test_seed_and_name_cannot_be_confused():
    assert not torch.equal(sample(name="1w", seed=1, count=8), sample(name="w", seed=11, count=8))


def test_a_constant_rule_fills():
    rule = InitRule(pattern="*", distribution="constant", mean=1.5)
    assert torch.equal(draw((3, 2), rule, name="w", seed=1), torch.full((3, 2), 1.5))


def test_a_scalar_and_an_empty_parameter_can_be_drawn():
    assert draw((), STANDARD, name="w", seed=1).shape == ()
    assert draw((0, 4), STANDARD, name="w", seed=1).shape == (0, 4)


@pytest.mark.parametrize(("offsets", "size"), [((2, 0), (3, 4)), ((0, -1), (4, 4)), ((0, 0), (5, 4)), ((0,), (4, 4))])
def test_a_block_outside_of_the_parameter_is_refused(offsets, size):
    with pytest.raises(ValueError, match=r"is not within|shorter|longer"):
        draw((4, 4), STANDARD, name="w", seed=1, offsets=offsets, local_shape=size)


def test_the_first_matching_rule_wins_and_others_are_not_asked():
    module = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 3), "b": torch.nn.Linear(3, 3)})
    rules = [
        InitRule(pattern="a.bias", distribution="constant", mean=7.0),
        InitRule(pattern="*.bias", distribution="constant", mean=8.0),
        STANDARD,
    ]
    initialize(module.named_parameters(), rules, seed=5)
    assert torch.equal(module["a"].bias, torch.full((3,), 7.0))
    assert torch.equal(module["b"].bias, torch.full((3,), 8.0))
    assert torch.equal(module["b"].weight, draw((3, 3), STANDARD, name="b.weight", seed=5))


def test_a_parameter_without_a_rule_is_an_error_that_names_it():
    with raises(NoInitRule, match=r"'weight'.*'\*\.bias'"):
        initialize(
            torch.nn.Linear(2, 2).named_parameters(), [InitRule(pattern="*.bias", distribution="normal")], seed=1
        )
