"""Settings of a rank's process that follow from the configuration and from the profile of its device."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nxdt_core.distributed.devices import HOST, PROFILES
from nxdt_core.run import train

HIGH = "trainer.float32_matmul_precision=high"
UNSAVED = "checkpoint.enabled=false"


@pytest.fixture
def host_with():
    """Run on the host under a profile with further facts."""

    def make(**facts):
        return patch.dict(PROFILES, {HOST.type: replace(PROFILES[HOST.type], **facts)})

    return make


@pytest.fixture
def matmul_precision():
    """Restore the precision of this process."""
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.usefixtures("matmul_precision")
def test_a_device_without_a_shorter_format_ignores_it_and_says_so(small_run, capsys, metric_rows):
    torch.set_float32_matmul_precision("highest")
    losses = []
    for name, overrides in (("plain", []), ("high", [HIGH])):
        config = small_run("trainer.max_steps=2", UNSAVED, *overrides, name=name)
        train(config)
        losses.append([row["loss"] for row in metric_rows(config.run_dir).values()])
        noted = "note: trainer.float32_matmul_precision=high has no effect: cpu has no" in capsys.readouterr().err
        assert noted == bool(overrides)
        assert torch.get_float32_matmul_precision() == "highest"
    assert losses[0] == losses[1]


@pytest.mark.usefixtures("matmul_precision")
def test_a_device_with_a_shorter_format_uses_it_where_the_run_says_so(small_run, host_with, capsys):
    with host_with(reduced_float32_matmul=True):
        for overrides, precision in (([HIGH], "high"), ([], "highest")):
            train(small_run("trainer.max_steps=1", UNSAVED, *overrides, name=precision))
            assert torch.get_float32_matmul_precision() == precision
    assert "note:" not in capsys.readouterr().err


class Pins(TorchDispatchMode):
    """Counts what is copied to pinned memory, which torch has with an accelerator only: here it is ordinary memory."""

    def __init__(self):
        super().__init__()
        self.dtypes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten._pin_memory.default:
            self.dtypes.append(args[0].dtype)
            return args[0].clone()
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("overrides", [(), ("data.pin_memory=false",)], ids=["default", "off"])
def test_inputs_are_copied_out_of_pinned_memory_where_the_profile_says_so(small_run, host_with, metric_rows, overrides):
    steps, micro_batches = 2, 2
    plain = small_run(f"trainer.max_steps={steps}", UNSAVED, name="plain")
    train(plain)
    config = small_run(f"trainer.max_steps={steps}", UNSAVED, *overrides)
    with host_with(pinned_host_memory=True), Pins() as pins:
        train(config)
    tokens = 0 if overrides else steps * micro_batches * 2
    assert (pins.dtypes.count(torch.int64), len(pins.dtypes)) == (tokens, tokens + (0 if overrides else steps))
    losses = [[row["loss"] for row in metric_rows(each.run_dir).values()] for each in (plain, config)]
    assert losses[0] == losses[1]


def test_a_device_that_gains_nothing_from_pinned_memory_says_so(small_run, capsys):
    with Pins() as pins:
        train(small_run("trainer.max_steps=1", UNSAVED, "data.pin_memory=true"))
    assert pins.dtypes == []
    assert "note: data.pin_memory has no effect" in capsys.readouterr().err
