"""Results on the meta device that are remembered: the same as those that torch computes each time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from nxdt_core.engine.estimate import live
from nxdt_core.engine.estimate.live import meta_result

aten = torch.ops.aten


class Compared(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls each operator thrice: as torch does, then twice as the estimate does."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.remembered = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(each.alias_info is not None for each in func._schema.arguments):
            return func(*args, **kwargs)  # thrice in place would be something else
        expected = form(func(*args, **kwargs))
        first = meta_result(func, args, kwargs)
        known = len(live._known)
        second = meta_result(func, args, kwargs)
        assert form(first) == form(second) == expected, func
        assert len(live._known) == known
        self.remembered += live._known.get(live._key(func, args, kwargs)) is not None
        return second


def form(result: Any) -> Any:
    if isinstance(result, (tuple, list)):
        return tuple(map(form, result))
    if not isinstance(result, torch.Tensor):
        return result
    storage = result.untyped_storage().nbytes()
    return result.shape, result.stride(), result.dtype, result.device, result.storage_offset(), storage


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_known", {})


def test_a_layer_has_the_forms_that_torch_gives_it() -> None:
    layer = torch.nn.TransformerEncoderLayer(16, 4, 32, activation=functional.gelu, device="meta")
    with Compared() as compared:
        layer(torch.empty(3, 5, 16, device="meta")).sum().backward()
    assert compared.remembered > 20


def test_layouts_in_memory_are_kept() -> None:
    image = torch.empty(2, 3, 8, 8, device="meta").to(memory_format=torch.channels_last)
    row = torch.empty(8, device="meta").expand(4, 8)
    with Compared() as compared:
        assert (image + 1).is_contiguous(memory_format=torch.channels_last)
        image.mul(image).clone()
        row.exp()
        row.t().sigmoid() @ row
        torch.empty(0, 4, device="meta").relu()
    assert compared.remembered >= 6


def test_numbers_of_other_kinds_are_other_inputs() -> None:
    whole = torch.empty(2, dtype=torch.int64, device="meta")
    assert meta_result(aten.add.Tensor, (whole, 1), {}).dtype is torch.int64
    assert meta_result(aten.mul.Scalar, (whole, 1), {}).dtype is torch.int64
    assert meta_result(aten.mul.Scalar, (whole, 1.0), {}).dtype is torch.float32
    assert meta_result(aten.mul.Scalar, (whole > 0, True), {}).dtype is torch.bool
    assert meta_result(aten.mul.Scalar, (whole > 0, 1), {}).dtype is torch.int64


def test_the_default_dtype_is_an_input() -> None:
    whole = torch.empty(2, dtype=torch.int64, device="meta")
    assert meta_result(aten.exp.default, (whole,), {}).dtype is torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert meta_result(aten.exp.default, (whole,), {}).dtype is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_results_that_are_inputs_stay_inputs() -> None:
    hidden = torch.empty(4, device="meta")
    for _ in range(2):
        assert meta_result(aten.view.default, (hidden, [2, 2]), {})._base is hidden
        assert meta_result(aten.mul_.Tensor, (hidden, 2), {}) is hidden
        same, _mask = meta_result(aten.native_dropout.default, (hidden, 0.0, False), {})
        direct, _mask = aten.native_dropout.default(hidden, 0.0, False)
        assert (same.untyped_storage()._cdata == hidden.untyped_storage()._cdata) == (
            direct.untyped_storage()._cdata == hidden.untyped_storage()._cdata
        )


def test_values_are_computed() -> None:
    numbers = torch.arange(4.0)
    for _ in range(2):
        assert meta_result(aten.add.Tensor, (numbers, numbers), {}).tolist() == [0.0, 2.0, 4.0, 6.0]
    assert not live._known


def test_what_torch_refuses_is_refused_each_time() -> None:
    one, other = torch.empty(2, 3, device="meta"), torch.empty(2, 3, device="meta")
    for _ in range(2):
        with pytest.raises(RuntimeError):
            meta_result(aten.mm.default, (one, other), {})
