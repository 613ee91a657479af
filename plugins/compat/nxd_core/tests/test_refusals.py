"""Calls of NxD Core's API that cannot mean anything here end in a code and a fix."""

import nxdt_plugin_nxd_core as nxd
import pytest
import torch
from nxdt_plugin_nxd_core import parallel_layers as layers
from nxdt_testing.ranks import RankPool
from torch import nn

from nxdt_core.errors import NxdtError
from plugins.compat.nxd_core.tests.loops import Decoder, batch


@pytest.fixture
def run():
    begun = []

    def begin(model_fn=Decoder, **config):
        begun.append(nxd.neuronx_distributed_config(**config))
        return begun[-1], nxd.initialize_parallel_model(begun[-1], model_fn)

    yield begin
    for nxd_config in begun:
        nxd_config.engine.shutdown()


def refused(code, *words):
    return pytest.raises(NxdtError, match=rf"(?s)\[{code}\].*" + ".*".join(words))


@pytest.mark.parametrize(
    ("config", "code", "words"),
    [
        ({"tensor_parallel_size": 2}, "NXDT-T061", "a multiple of 2"),
        ({"pipeline_parallel_size": 0}, "NXDT-T061", "pipeline_parallel_size=0"),
        ({"optimizer_config": {"zero_enabled": True}}, "NXDT-T050", "zero_one_enabled"),
        ({"pipeline_config": {"microbatches": 2}}, "NXDT-T050", "num_microbatches"),
        ({"pad_model": True}, "NXDT-T050", "numbers of heads"),
        ({"activation_checkpoint_config": "some"}, "NXDT-T050", "'full'"),
        ({"model_init_config": {"meta_device_init": True}}, "NXDT-T050", "param_init_fn"),
    ],
)
def test_configurations_that_cannot_be(config, code, words):
    with refused(code, words):
        nxd.neuronx_distributed_config(**config)


@pytest.mark.parametrize(
    ("layer", "argument"),
    [
        (lambda: layers.ColumnParallelLinear(4, 4, skip_bias_add=True), "skip_bias_add"),
        (lambda: layers.ColumnParallelLinear(4, 4, stride=2), "stride"),
        (lambda: layers.ColumnParallelLinear(4, 4, sequence_parallel_enabled=True), "sequence_dimension"),
        (lambda: layers.RowParallelLinear(4, 4, reduce_output=False), "reduce_output"),
        (lambda: layers.ParallelEmbedding(4, 4, shard_across_embedding=True), "shard_across_embedding"),
        (lambda: layers.GQAQKVColumnParallelLinear(4, [4, 2, 2]), "output_sizes"),
        (lambda: layers.GQAQKVColumnParallelLinear(4, [4, 2], kv_size_multiplier=2), "gather_output"),
        (lambda: layers.parallel_cross_entropy(torch.zeros(1, 4), torch.zeros(1).long(), 0.1), "label_smoothing"),
    ],
)
def test_layers_that_cannot_be(layer, argument):
    with refused("NXDT-T050", argument):
        layer()


def without_layers():
    return nn.Sequential(nn.Linear(2, 2))


def of_two_dtypes():
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.float64))


@pytest.mark.parametrize(
    ("model_fn", "config", "code", "words"),
    [
        (lambda: "llama", {}, "NXDT-T051", "returned str"),
        (lambda: None, {}, "NXDT-T051", "returned NoneType"),
        (without_layers, {"activation_checkpoint_config": "full"}, "NXDT-T053", "transformer_layer_cls"),
        (of_two_dtypes, {}, "NXDT-T050", "one dtype"),
    ],
)
def test_models_that_cannot_be(run, model_fn, config, code, words):
    with refused(code, words):
        run(model_fn, **config)


def test_a_plain_dictionary_is_no_configuration():
    with refused("NXDT-T050", "nxd_config=dict"):
        nxd.initialize_parallel_model({"tensor_parallel_size": 1}, Decoder)


def test_an_optimizer_of_other_parameters_is_refused(run):
    nxd_config, model = run()
    with refused("NXDT-T058", "model.parameters"):
        nxd.initialize_parallel_optimizer(nxd_config, torch.optim.SGD, nn.Linear(2, 2).parameters(), lr=0.1)
    with refused("NXDT-T050", "momentun"):
        nxd.initialize_parallel_optimizer(nxd_config, torch.optim.SGD, model.parameters(), lr=0.1, momentun=0.9)
    optimizer = nxd.initialize_parallel_optimizer(nxd_config, torch.optim.SGD, model.parameters(), lr=0.1)
    with refused("NXDT-T050", "closure"):
        optimizer.step(lambda: None)
    with refused("NXDT-T058", "some of the parameters"):
        layers.clip_grad_norm([*model.parameters()][:1], 1.0)
    with refused("NXDT-T050", "norm_type=inf"):
        layers.clip_grad_norm(model.parameters(), 1.0, norm_type=float("inf"))


def test_a_model_in_its_layout_keeps_its_dtype_and_device(run):
    _, model = run()
    assert model.to(torch.device("cpu")) is model
    for change in (model.half, lambda: model.to(torch.float32)):
        with refused("NXDT-T050", "model_fn"):
            change()


def test_a_model_without_a_loss_is_refused(run):
    _, model = run()
    with refused("NXDT-T056", "output_loss_value_spec"):
        model.run_train(batch(0))  # logits


def test_what_the_model_returns_is_what_forward_returns(run):
    _, model = run()
    assert model(batch(0)).shape == (8, 6, 16)
    assert {name.partition(".")[0] for name, _ in model.named_children()} >= {"embed", "layers", "head"}
    assert "layers.3.attention.out" in dict(model.named_modules())
    assert model.dtype == torch.float64
    assert type(model.local_module()) is Decoder
    with pytest.raises(AttributeError, match="config"):
        _ = model.config


def test_finished_gradients_are_not_clipped_again(run):
    nxd_config, model = run()
    optimizer = nxd.initialize_parallel_optimizer(nxd_config, torch.optim.SGD, model.parameters(), lr=0.1)
    model(batch(0), labels=batch(0))["loss"].backward()
    norm = layers.clip_grad_norm(model.parameters(), 1e-3)
    clipped = {name: p.grad.clone() for name, p in model.named_parameters()}
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer.step()
    assert optimizer.grad_norm is norm
    for name, parameter in model.named_parameters():  # not bit by bit: processors differ in fused multiply-adds
        torch.testing.assert_close(before[name] - 0.1 * clipped[name], parameter, rtol=1e-14, atol=1e-16)


class Uneven(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = layers.ColumnParallelLinear(4, 7, gather_output=False)


class Grouped(nn.Module):
    """Its attention alone is sequence parallel."""

    def __init__(self):
        super().__init__()
        self.qkv = layers.GQAQKVColumnParallelLinear(
            8, (8, 4), gather_output=False, sequence_parallel_enabled=True, sequence_dimension=1
        )


class HeadFirst(Decoder):
    """Registers what runs behind the layers before them."""

    def __init__(self):
        super().__init__()
        self._modules = dict(reversed(self._modules.items()))


class RankSeeded(Decoder):
    def __init__(self, rank=None):
        import os

        torch.manual_seed(int(os.environ["RANK"]))
        super().__init__()


def codes_on_ranks():
    """What each of several wrong programs ends in."""
    found = {}
    pipeline = {"pipeline_parallel_size": 2, "pipeline_config": {"num_microbatches": 2}}

    def uneven_batch(nxd_config, model):
        model.run_train(batch(0)[:3], labels=batch(0)[:3])

    def forward(nxd_config, model):
        model(batch(0))

    def train(nxd_config, model):
        model.run_train(batch(0), labels=batch(0))

    programs = {
        "uneven layer": ({"tensor_parallel_size": 2}, Uneven, train),
        "different ranks": ({}, RankSeeded, train),
        "uneven batch": (pipeline, Decoder, uneven_batch),
        "forward in a pipeline": (pipeline, Decoder, forward),
        "no layers": (pipeline, Uneven, forward),
        "no width": (pipeline, HeadFirst, forward),
        "too few layers": (pipeline, lambda: Decoder(numbers=1), train),
        "sequence parallel attention": ({"tensor_parallel_size": 2}, Grouped, train),
        "sequence parallel": ({"tensor_parallel_size": 2, "sequence_parallel": True}, Decoder, train),
    }
    for name, (config, model_fn, use) in programs.items():
        nxd_config = nxd.neuronx_distributed_config(**config)
        try:
            use(nxd_config, nxd.initialize_parallel_model(nxd_config, model_fn))
        except NxdtError as error:
            found[name] = (error.code, str(error))
        nxd_config.engine.shutdown()
    return found


def test_programs_that_cannot_run_on_two_ranks():
    for found in RankPool(2).run(codes_on_ranks):
        assert {name: code for name, (code, _) in found.items()} == {
            "uneven layer": "NXDT-P021",
            "different ranks": "NXDT-T052",
            "uneven batch": "NXDT-T057",
            "forward in a pipeline": "NXDT-T055",
            "no layers": "NXDT-T053",
            "no width": "NXDT-T050",
            "too few layers": "NXDT-P132",
            "sequence parallel attention": "NXDT-T050",
            "sequence parallel": "NXDT-T050",
        }


def misplaced():
    nxd_config = nxd.neuronx_distributed_config(
        pipeline_parallel_size=2, pipeline_config={"num_microbatches": 2, "hidden_size": 8}
    )
    model = nxd.initialize_parallel_model(nxd_config, HeadFirst)
    model.run_train(batch(0), labels=batch(0))


def test_modules_registered_in_another_order_than_they_run_are_refused():
    with pytest.raises(AssertionError, match=r"NXDT-T054.*(embed|positions|head|norm)"):
        RankPool(2).run(misplaced)
