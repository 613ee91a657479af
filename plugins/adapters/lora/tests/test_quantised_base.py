"""Frozen weights in 4 and 8 bits: what peft computes over bitsandbytes, one graph a layer, and their bytes."""

from __future__ import annotations

import copy
from itertools import accumulate

import pytest
import torch
from nxdt_plugin_lora.peft_files import describe, write_peft
from nxdt_testing.errors import raises
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from nxdt_core.engine.compile import compile_layers
from nxdt_core.engine.precision import quantise_frozen
from nxdt_core.errors.configuration import ConfigError
from nxdt_core.errors.layouts import BaseNotQuantised
from nxdt_core.models.quantised import QuantisedWeight
from nxdt_core.train.plan import plan
from nxdt_core.train.weights.loading import base_digest, load_foreign
from tests.graph_counts import GraphCounts

transformers = pytest.importorskip("transformers", reason="transformers is not installed: nothing to compare with")

library = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: nothing can be quantised")

STEPS = 20


@pytest.fixture
def ids():
    return torch.randint(0, 60, (2, 12), generator=torch.Generator().manual_seed(0))


def backward(logits, ids):
    """Return the loss of a batch, after its backward pass."""
    loss = torch.nn.functional.cross_entropy(logits()[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
    loss.backward()
    return loss


def losses_of(logits, parameters, ids, steps=STEPS):
    """Of steps that learn one batch."""
    optimizer, losses = torch.optim.AdamW(parameters, lr=1e-2), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = backward(logits, ids)
        optimizer.step()
        losses.append(loss.item())
    return losses


def opened(run, base, directory, **quantised):
    """The adapter of ``run`` in peft, over a base that transformers reads and quantises."""
    shapes = {name: tuple(p.shape) for name, p in run.trained.items()}
    config, tensors = describe(run.builder, run.lora, shapes, base=None)
    trained = run.trained
    write_peft(directory, config, tensors, lambda names: [trained[name].detach() for name in names], base="")
    peft = pytest.importorskip("peft", reason="peft is not installed: nothing to compare with")
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, **quantised)
    return peft.PeftModel.from_pretrained(model, directory, is_trainable=True).train()  # else some CPUs use bfloat16


def coded(run):
    return {name: p for name, p in run.module.named_parameters() if isinstance(p, QuantisedWeight)}


@pytest.mark.parametrize(("model", "precision"), [("wide", "fp32"), ("wide", "autocast"), ("odd", "fp32")])
def test_nf4_trains_as_peft_over_bitsandbytes(start, ids, tmp_path, model, precision):
    """``odd``: rows of 48 and 104 elements, which share blocks of 64."""
    run = start(model, {"base_dtype": "nf4"}, precision)
    base = start(model, {}, precision).save_base(tmp_path / "base")
    computes = torch.bfloat16 if precision == "autocast" else torch.float32
    four_bits = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=computes,
    )
    theirs = opened(run, base, tmp_path / "adapter", quantization_config=four_bits)
    layers = [layer for layer in theirs.modules() if isinstance(layer, library.nn.Linear4bit)]
    assert len(layers) == len(coded(run)) == 14
    mine = {tuple(weight.dequantised().flatten().tolist()) for weight in coded(run).values()}
    for layer in layers:
        state = copy.copy(layer.weight.quant_state)
        state.shape = torch.Size([1, state.shape.numel()])
        whole = library.functional.dequantize_4bit(layer.weight.data, state).to(computes)
        if layer.in_features % 64:  # whose blocks its product for CPUs reads as if each row began one
            values = whole.view(layer.weight.quant_state.shape)
            layer.forward = lambda hidden, values=values: functional.linear(hidden, values)
        assert tuple(whole.flatten().tolist()) in mine
    kept = [(layer.weight, layer.weight.quant_state) for layer in layers]
    theirs_bytes = sum(w.nbytes + s.absmax.nbytes + s.offset.nbytes + s.state2.absmax.nbytes for w, s in kept)
    assert sum(weight.storage_bytes for weight in coded(run).values()) <= 1.05 * theirs_bytes
    mixed = torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast")
    ours, of_peft = mixed(lambda: run.module(ids)), mixed(lambda: theirs(ids).logits)
    assert backward(ours, ids).item() == pytest.approx(backward(of_peft, ids).item(), rel=2e-3)
    found = dict(part for name, tensor in run.peft_tensors.items() for part in tensor.write(run.trained[name].grad))
    trained = {name.replace(".default", ""): p for name, p in theirs.named_parameters() if p.requires_grad}
    assert found.keys() == trained.keys()
    # A bfloat16 product depends on the order of its sums, and so on the CPU: gradients differ by 0.024 at most on two.
    within = 0.06 if precision == "autocast" else 1e-5
    for name, gradient in found.items():
        expected = trained[name].grad
        assert (gradient - expected).norm() <= within * expected.norm(), name
        assert expected.any() == name.endswith("lora_B.weight")  # lora_B begins with zeros
    losses = losses_of(ours, run.trained.values(), ids)
    assert losses[-1] < 0.5 * losses[0]
    if precision == "fp32":  # steps of AdamW enlarge what bfloat16 rounds
        compared = STEPS if model == "wide" else 10  # later losses are small and jump
        expected = losses_of(of_peft, trained.values(), ids)[:compared]
        assert losses[:compared] == pytest.approx(expected, abs=1e-5)


def saved_by(run, ids):
    """Shapes of the tensors of floating point that wait for backward after a forward pass."""
    shapes = set()

    def pack(tensor):
        if tensor.is_floating_point():
            shapes.add(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run.module(ids)
    return shapes


@pytest.mark.parametrize("dtype", ["nf4", "int8"])
def test_a_layer_is_one_graph_that_keeps_codes_for_backward(start, ids, dtype):
    eager, compiled = (start("wide", {"base_dtype": dtype}) for _ in range(2))
    compile_layers(compiled.module, compiled.model.plan, backend="aot_eager_decomp_partition")
    with GraphCounts() as counts:
        found = losses_of(lambda: compiled.module(ids), compiled.trained.values(), ids)
    assert (counts.graphs, counts.breaks) == (2, 0)  # nothing before the first layer trains
    assert found == pytest.approx(losses_of(lambda: eager.module(ids), eager.trained.values(), ids), abs=1e-4)
    for run in (eager, compiled):
        saved = saved_by(run, ids)
        assert saved
        assert not saved & {(128, 64), (64, 128)}


@pytest.mark.parametrize(("dtype", "bits"), [("nf4", 4.127), ("int8", 8.11)])
def test_the_plan_knows_the_bytes_of_the_weights(start, dtype, bits):
    run = start("planned", {"base_dtype": dtype})
    weights = plan(run.config, memory_bytes=0).estimate.fullest.memory.weights
    held = [p for p in run.module.parameters() if not isinstance(p, QuantisedWeight)]
    codes = coded(run).values()
    assert weights == pytest.approx(sum(p.nbytes for p in held) + sum(p.storage_bytes for p in codes), rel=0.01)
    assert 8 * sum(p.storage_bytes for p in codes) == pytest.approx(bits * sum(p.numel() for p in codes), rel=0.01)


@pytest.mark.parametrize("model", ["gpt2", "mixtral", "hf-mixture"])
def test_linear_layers_of_each_model_have_codes(start, ids, model):
    """Biases, experts and the modules of transformers are no obstacle, nor are weights in bfloat16."""
    run, plain = (start(model, adapter, "bf16SR") for adapter in ({"base_dtype": "int8"}, {}))
    assert coded(run)
    assert all(weight.dtype == torch.bfloat16 for weight in coded(run).values())
    found, expected = (
        losses_of(lambda each=each: each.module(ids), each.trained.values(), ids, steps)
        for each, steps in ((run, STEPS), (plain, 1))
    )
    assert found[-1] < found[0] - 0.3
    assert found[0] == pytest.approx(expected[0], abs=0.05)


def test_weights_that_have_no_codes_are_named(start):
    name = "'layers.0.attention.q_proj'"
    with raises(BaseNotQuantised, match="the adapter freezes no weight of a linear layer"):
        start("wide", {"base_dtype": "nf4", "enable_lora": False})
    with pytest.raises(ConfigError, match="pissa decomposes the weights themselves"):
        start("wide", {"base_dtype": "nf4", "init_lora_weights": "pissa"})
    run = start("llama", {})
    with raises(BaseNotQuantised, match=f"{name} has float64 weights"):
        quantise_frozen(run.module.double(), run.model.plan, "int8")


@pytest.mark.parametrize("shape", [(64, 96), (64, 32), (6, 160), (3, 10), (5, 7)])
def test_blocks_go_on_from_row_to_row(shape):
    """As in bitsandbytes, whose blocks are of the flat weight: of one row, since its kernel for CPUs reads others
    wrongly where 64 does not divide them."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    weight = QuantisedWeight.empty(values, "nf4")
    weight.copy_(values)
    padded = functional.pad(values.flatten(), (0, values.numel() % 2))  # of which its kernel takes no odd number
    codes, state = library.functional.quantize_4bit(padded, blocksize=64, compress_statistics=True, quant_type="nf4")
    expected = library.functional.dequantize_4bit(codes, state).flatten()[: values.numel()].view(shape)
    assert torch.equal(weight + 0, expected)
    assert (weight - values).abs().max() < 0.2 * values.abs().max()


def test_what_is_done_with_a_weight_is_done_with_its_values():
    values = torch.randn(300, 64, generator=torch.Generator().manual_seed(0))  # more than a group of magnitudes
    weight = QuantisedWeight.empty(values, "nf4", (0, 511))
    weight.copy_(values)
    codes, state = library.functional.quantize_4bit(values, blocksize=64, compress_statistics=True, quant_type="nf4")
    assert torch.equal(weight + 0, library.functional.dequantize_4bit(codes, state))
    assert weight.samples.tolist() == [values[0, 0].bfloat16(), values[7, 63].bfloat16()]
    again = torch.empty_like(weight)
    again.copy_(weight)
    assert all(torch.equal(own, part) for own, part in zip(again.parts, weight.parts, strict=True))
    weight.zero_()
    assert not weight.dequantised().any()


def allocated(profiled):
    """Bytes that torch has allocated in a block and not freed, at its end and at most."""
    events = [each for each in profiled.profiler.kineto_results.events() if each.name() == "[memory]"]
    totals = [*accumulate(each.nbytes() for each in sorted(events, key=lambda each: each.start_ns()))]
    return totals[-1], max(totals)


def test_a_directory_is_quantised_weight_by_weight_as_it_is_read(start, tmp_path):
    base = start("planned", {}).save_base(tmp_path / "base")
    drawn, loaded = (start("planned", {"base_dtype": "nf4"}) for _ in range(2))
    for weight in coded(loaded).values():
        weight.zero_()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        load_foreign(base, config=loaded.config, engine=loaded.engine, model=loaded.model)
    kept, peak = allocated(profiled)
    assert kept == 0
    # A host needs 20 bytes per element where a matrix is smaller than what is quantised at a time; there are 14.
    assert peak < 14 * max(weight.nbytes for weight in coded(loaded).values())
    for name, weight in coded(drawn).items():
        found = coded(loaded)[name]
        assert all(torch.equal(own, part) for own, part in zip(found.parts, weight.parts, strict=True))
    assert base_digest(loaded.model, loaded.engine.ranks) == base_digest(
        start("planned", {}).model, loaded.engine.ranks
    )
