"""Which run, model and optimizer a call works on: those of the objects that it gets, or of the process group."""

import nxdt_plugin_nxd_core as nxd
import pytest
import torch
from nxdt_plugin_nxd_core import parallel_layers as layers
from torch import nn

from nxdt_core.errors import NxdtError
from plugins.compat.nxd_core.tests.loops import MICRO, Decoder, Layer, batch, groups_of
from tests.calls import Call, run_in_turn

PIPELINE = {"num_microbatches": MICRO, "transformer_layer_cls": Layer}


class LastStageFrozen(Decoder):
    def __init__(self):
        super().__init__()
        for part in (*self.layers[2:], self.norm, self.head):
            part.requires_grad_(False)


class HeadsOfOneProcess(nn.Module):
    """Splits features into heads as if each rank had all of them."""

    def __init__(self):
        super().__init__()
        self.up = layers.ColumnParallelLinear(8, 8, gather_output=False)
        self.inner = HeadsOfEight()

    def forward(self, rows):
        return self.inner(self.up(rows))


class HeadsOfEight(nn.Module):
    def forward(self, rows):
        return rows.view(len(rows), 4, 2)


def a_frozen_stage():
    """Per rank: the options of the groups, the scheduled rates, and whether weights changed."""
    nxd_config = nxd.neuronx_distributed_config(pipeline_parallel_size=2, pipeline_config=PIPELINE)
    model = nxd.initialize_parallel_model(nxd_config, LastStageFrozen)
    groups = groups_of(model.named_parameters())
    optimizer = nxd.initialize_parallel_optimizer(nxd_config, torch.optim.AdamW, groups, lr=0.01, betas=(0.8, 0.9))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 1 / (1 + step), lambda step: 0.5])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.run_train(input_ids=batch(0), labels=batch(0))
    optimizer.step()
    scheduler.step()
    changed = any(not torch.equal(value, before[name]) for name, value in model.state_dict().items())
    found = [(group["weight_decay"], group["betas"], group["lr"]) for group in optimizer.param_groups]
    nxd_config.engine.shutdown()
    return found, changed


def a_shape_that_no_shard_has():
    """The code and the module that an own call of the model ends in, and then a call of ``run_train``."""
    nxd_config = nxd.neuronx_distributed_config(tensor_parallel_size=2)
    model = nxd.initialize_parallel_model(nxd_config, HeadsOfOneProcess)
    found = []
    for call in (model, model.run_train):
        with pytest.raises(NxdtError) as caught:
            call(torch.ones(2, 8))
        found.append((caught.value.code, caught.value.module))
    nxd_config.engine.shutdown()
    return found


@pytest.fixture(scope="module")
def found():
    calls = {function.__name__: Call(2, function, ()) for function in (a_frozen_stage, a_shape_that_no_shard_has)}
    return run_in_turn(calls)


def test_a_stage_that_trains_nothing_has_the_callers_groups(found):
    expected = [(0.1, (0.8, 0.9), 0.005), (0.0, (0.8, 0.9), 0.01)]
    assert found["a_frozen_stage"] == [(expected, True), (expected, False)]


def test_a_call_of_the_model_names_the_module_that_cannot_run_on_its_shard(found):
    assert found["a_shape_that_no_shard_has"] == [[("NXDT-P071", "inner")] * 2] * 2


@pytest.fixture
def begin():
    begun = []

    def run():
        begun.append(nxd.neuronx_distributed_config())
        return begun[-1], nxd.initialize_parallel_model(begun[-1], Decoder, numbers=1)

    yield run
    for nxd_config in begun:
        nxd_config.engine.shutdown()


def test_optimizers_of_separate_parameters_leave_each_others_alone(begin):
    nxd_config, model = begin()
    first, second = [*model.parameters()][::2], [*model.parameters()][1::2]
    one = nxd.initialize_parallel_optimizer(nxd_config, torch.optim.SGD, first, lr=0.1)
    other = nxd.initialize_parallel_optimizer(nxd_config, torch.optim.SGD, second, lr=0.1)
    model(batch(0), labels=batch(0))["loss"].backward()
    before, gradients = [each.detach().clone() for each in second], [each.grad.clone() for each in second]
    layers.clip_grad_norm(first, 1.0)
    one.step()
    assert all(map(torch.equal, before, second))
    assert all(torch.equal(gradient, each.grad) for gradient, each in zip(gradients, second, strict=True))
    other.step()
    assert not all(map(torch.equal, before, second))
    with pytest.raises(NxdtError, match="NXDT-T058"):
        layers.clip_grad_norm(model.parameters(), 1.0)


def test_a_run_trains_on_after_another_has_begun(begin, tmp_path):
    nxd_config, model = begin()
    optimizer = nxd.initialize_parallel_optimizer(nxd_config, torch.optim.SGD, model.parameters(), lr=0.1)
    nxd.save_checkpoint(str(tmp_path), "first", model, optimizer, async_save=True)
    _, other = begin()
    nxd.finalize_checkpoint()
    assert not nxd_config.saves.busy
    nxd.save_checkpoint(str(tmp_path), "other", other)
    before = [each.detach().clone() for each in model.parameters()]
    model.run_train(input_ids=batch(0), labels=batch(0))
    optimizer.step()
    assert not all(map(torch.equal, before, model.parameters()))
    nxd.load_checkpoint(str(tmp_path), "first", model, optimizer)
    assert all(map(torch.equal, before, model.parameters()))
    with pytest.raises(NxdtError, match="NXDT-T058"):  # it takes the model of the newest run
        layers.clip_grad_norm(model.parameters(), 1.0)
