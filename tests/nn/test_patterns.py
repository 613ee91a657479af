import pytest

from nxdt_core.nn.patterns import matches


@pytest.mark.parametrize(
    ("pattern", "path", "expected"),
    [
        ("layers.*.attention.q_proj", "layers.17.attention.q_proj", True),
        ("layers.*.attention.q_proj", "layers.17.x.attention.q_proj", False),
        ("layers.*", "layers.3", True),
        ("layers.*", "layers.3.mlp", False),
        ("*.bias", "layers.0.mlp.bias", True),
        ("*.bias", "bias", False),
        ("*", "anything.at.all", True),
        ("norm.weight", "norm.weight", True),
        ("norm.weight", "norm_weight", False),
        ("*_norm.weight", "layers.0.input_norm.weight", False),
        ("layers.*.*_norm.weight", "layers.0.input_norm.weight", True),
    ],
)
def test_patterns_match_whole_paths(pattern, path, expected):
    assert matches(pattern, path) is expected
