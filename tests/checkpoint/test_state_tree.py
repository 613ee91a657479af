"""State trees come back equal in values and types; what cannot is refused with its place named."""

from __future__ import annotations

import collections
import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nxdt_testing.errors import raises

from nxdt_core.checkpoint import CheckpointFacts, load_state, read_manifest
from nxdt_core.checkpoint.format.state_tree import decode_tree, encode_tree
from nxdt_core.errors.checkpoints import TensorStateUnsupported, UnsavableState
from tests.checkpoint.memory import MemoryStorage
from tests.sampling import takes_all

texts = st.text(max_size=8) | st.sampled_from(["$", "~", "/", "a/b", "~1", ""])
scalars = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | texts
tensors = st.integers(0, 3).map(lambda n: torch.arange(n, dtype=torch.int16))
trees = st.recursive(
    scalars | tensors,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(texts | st.integers(-3, 3), inner, max_size=4)
    ),
    max_leaves=20,
)


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and left.dtype == right.dtype and torch.equal(left, right)
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, float) and math.isnan(left):
        return math.isnan(right)
    if isinstance(left, float):
        return left == right and math.copysign(1, left) == math.copysign(1, right)
    return left == right


def test_any_tree_comes_back(pytestconfig: pytest.Config) -> None:
    count = 150 if takes_all(pytestconfig) else 50

    @settings(max_examples=count, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(tree=st.dictionaries(texts, trees, max_size=5))
    def drawn(tree: dict[str, Any]) -> None:
        check_that_it_comes_back(tree)

    drawn()


def check_that_it_comes_back(tree: dict[str, Any]) -> None:
    stored: dict[str, torch.Tensor] = {}

    def put_tensor(at: str, value: object) -> str | None:
        if not isinstance(value, torch.Tensor):
            return None
        assert at not in stored, "two places have one name"
        stored[at] = value
        return at

    form = json.loads(json.dumps(encode_tree(tree, put_tensor=put_tensor), allow_nan=False))
    assert same(decode_tree(form, stored), tree)


def test_random_states_go_through_a_checkpoint(save: Any) -> None:
    storage = MemoryStorage()
    state = {
        "rng": {"torch": torch.get_rng_state(), "python": random.getstate()},
        "ordered": collections.OrderedDict(b=1, a=2),
        "by_rank": {0: "x", 1: "y"},
        "a/b": torch.tensor(1),
        "a": {"b": torch.tensor(2)},
    }
    save(storage, 1, state=state)
    loaded = load_state(storage, read_manifest(storage, 1))
    assert same(loaded, {**state, "ordered": {"b": 1, "a": 2}})


class Thing:
    pass


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (Thing(), "Thing"),
        (b"bytes", "bytes"),
        ({1, 2}, "set"),
        (np.float64(1.0), "numpy.float64"),
        (np.zeros(2), "ndarray"),
        (Path("x"), "PosixPath"),
        (lambda: 0, "function"),
        (torch.float32, "dtype"),
        ({(1, 2): 3}, "key"),
        ({True: 3}, "key"),
    ],
)
def test_what_is_neither_json_nor_a_tensor_is_refused_by_name(save: Any, value: object, named: str) -> None:
    storage = MemoryStorage()
    with raises(UnsavableState, match=r"/callbacks/mine/0.*" + named):
        save(storage, 1, state={"callbacks": {"mine": [value]}})
    assert not storage.objects, "nothing may be written of a state that cannot be saved"


def test_a_state_within_itself_is_refused(save: Any) -> None:
    state: dict[str, Any] = {}
    state["again"] = state
    with raises(UnsavableState, match="within itself"):
        save(MemoryStorage(), 1, state=state)


@pytest.mark.parametrize(
    ("tensor", "named"),
    [
        (torch.eye(2).to_sparse(), "sparse"),
        (torch.empty(2, device="meta"), "meta"),
        (torch.zeros(2, dtype=torch.complex64), "complex64"),
        (torch.eye(2).as_subclass(type("Special", (torch.Tensor,), {})), "Special"),
    ],
)
@pytest.mark.parametrize("part", ["model", "optimizer", "state"])
def test_tensors_without_plain_bytes_are_refused_by_name(save: Any, tensor: Any, named: str, part: str) -> None:
    storage = MemoryStorage()
    with raises(TensorStateUnsupported, match=f"inner.name.*{named}"):
        save(storage, 1, **{part: {"inner.name": tensor}})
    assert not storage.objects


def test_a_config_that_is_not_json_is_refused_by_name(save: Any) -> None:
    with raises(UnsavableState, match="config/run/dir"):
        save(MemoryStorage(), 1, facts=CheckpointFacts(config={"run": {"dir": Path("x")}}))


@pytest.mark.parametrize(
    "form",
    [
        {"$": "object", "class": "os.system"},
        {"$": "tensor", "name": "missing"},
        {"$": "tuple"},
        {"$": "tuple", "items": 3},
        {"$": "float", "value": []},
        {"$": "dict", "items": [[[], 1]]},
        {"$": []},
    ],
)
def test_malformed_trees_are_refused(form: Any) -> None:
    with pytest.raises(ValueError, match=r"malformed|unknown tag"):
        decode_tree([form])
