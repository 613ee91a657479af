"""Patterns of plans and rules."""

from __future__ import annotations

import pytest

from nxdt_core.models.patterns import matches, matches_any


@pytest.mark.parametrize(
    ("pattern", "path", "expected"),
    [
        ("*", "norm.weight", True),
        ("*", "layers.0.mlp", True),
        ("norm.weight", "norm.weight", True),
        ("norm.weight", "final_norm.weight", False),
        ("layers.*.norm.weight", "layers.11.norm.weight", True),
        ("layers.*.weight", "layers.0.norm.weight", False),
        ("layers.*", "layers.0.norm", False),
        ("layers.*", "layers.0", True),
        ("*.bias", "a.b.c.bias", True),
        ("*.bias", "bias", False),
        ("*norm.weight", "layers.3.mlp_norm.weight", True),
        ("*norm.weight", "norm.weight", True),
        ("*norm.weight", "norm.weights", False),
        ("layers.*.*_norm.weight", "layers.0.mlp_norm.weight", True),
        ("layers.*.*_norm.weight", "layers.0.mlp.weight", False),
        ("a.b", "aXb", False),
    ],
)
def test_a_star_is_part_of_one_component_and_at_the_head_any_depth(pattern, path, expected):
    assert matches(pattern, path) is expected


def test_any_pattern_is_enough():
    assert matches_any(("x", "*.bias"), "a.bias")
    assert not matches_any((), "a.bias")
