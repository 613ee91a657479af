"""A packed sequence trains a model as its conversations do apart, to the last bit that float64 has."""

from __future__ import annotations

import json

import pytest
import torch
from nxdt_plugin_sft_chat.config import ChatConfig
from nxdt_plugin_sft_chat.loader import ChatData

from nxdt_core.config import load as load_config
from nxdt_core.data.loader import collate
from nxdt_core.models.loss import CausalLM
from nxdt_core.protocols.batch import Batch
from nxdt_core.protocols.dataset import DataContext
from nxdt_core.train import build


@pytest.fixture(scope="module")
def model():
    """A Llama of two layers in float64, with weights drawn here."""
    pytest.importorskip("nxdt_plugin_llama", reason="nxdt-plugin-llama is not installed")
    config = load_config("recipe:llama-tiny-sft", ["model.num_layers=2"])
    torch.manual_seed(1)
    built = build.model_builder(config).build().double()
    for module in built.modules():
        reset = getattr(module, "reset_buffers", None)
        if reset is not None:
            reset()
    for parameter in built.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    return built


def trained(model, batches):
    """Loss sum, weight, and gradients of a pass over ``batches``."""
    model.zero_grad()
    objective, total, weight = CausalLM(), 0.0, 0.0
    for batch in batches:
        found = objective(model(batch.input_ids, batch.position_ids, batch.document_ids), batch)
        found.loss_sum.backward()
        total += found.loss_sum.item()
        weight += found.weight.item()
    return total, weight, torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def batches(dataset):
    return [collate([dataset[index]]) for index in range(len(dataset))]


@pytest.fixture(scope="module")
def apart_and_packed(tokenizer, shipped, tmp_path_factory):
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    path.write_text("\n".join(map(json.dumps, shipped[:24])))
    context = DataContext(seq_length=384, seed=1, tokenizer=tokenizer)
    apart, packed = (
        ChatData(ChatConfig(train_files=(path,), packing=packing, truncation="drop"), context).split("train")
        for packing in (False, True)
    )
    assert len(packed) < len(apart) / 2
    return batches(apart), batches(packed)


@pytest.fixture(scope="module")
def of_padded_ones(model, apart_and_packed):
    """What the conversations apart give."""
    return trained(model, apart_and_packed[0])


def test_loss_and_gradients_of_packed_conversations_are_those_of_padded_ones(model, apart_and_packed, of_padded_ones):
    loss, weight, gradient = of_padded_ones
    packed_loss, packed_weight, packed_gradient = trained(model, apart_and_packed[1])
    assert packed_weight == weight > 500
    assert packed_loss == pytest.approx(loss, rel=1e-12)
    assert torch.allclose(packed_gradient, gradient, rtol=1e-9, atol=1e-10)
    assert gradient.abs().sum() > 1


def test_it_is_the_numbers_of_documents_that_keep_them_apart(model, apart_and_packed, of_padded_ones):
    _, packed = apart_and_packed
    blind = [Batch(input_ids=b.input_ids, labels=b.labels, position_ids=b.position_ids) for b in packed]
    loss, _, gradient = of_padded_ones
    blind_loss, _, blind_gradient = trained(model, blind)
    assert blind_loss != pytest.approx(loss, rel=1e-9)
    assert not torch.allclose(blind_gradient, gradient, rtol=1e-9, atol=1e-10)
