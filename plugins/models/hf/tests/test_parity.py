"""The same numbers as transformers gives from the same weights, with its own attention."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from nxdt_core.models.step_boundary import at_step_boundary
from nxdt_core.protocols.step_context import StepContext

LENGTH = 40  # more than the windows of 16


def tokens(rows: int, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(0, 272, (rows, length), generator=torch.Generator().manual_seed(3))


def test_logits_and_gradients_equal_those_of_transformers(builder, materialised, theirs, fused, family):
    made = builder(family)
    ours = materialised(made)
    other = theirs(made, ours)
    ids = tokens(2)
    logits, expected = ours(ids), other(input_ids=ids, use_cache=False).logits
    assert (logits - expected).abs().max() <= 1e-5
    assert expected.std() > 0.1
    grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(4)) / expected.numel() ** 0.5
    logits.backward(grad)
    expected.backward(grad)
    _assert_equal_gradients(fused, ours, other)


def test_experts_may_have_another_gate(builder, materialised, theirs):
    made = builder("qwen3-moe", hidden_act="gelu")
    ours = materialised(made)
    with torch.no_grad():
        logits, expected = ours(tokens(2)), theirs(made, ours)(input_ids=tokens(2), use_cache=False).logits
    assert (logits - expected).abs().max() <= 1e-5
    assert expected.std() > 0.1


def _assert_equal_gradients(fused, ours, theirs):
    trained = ((name, parameter) for name, parameter in ours.named_parameters() if parameter.requires_grad)
    gradients = fused({name: parameter.grad for name, parameter in trained})
    expected = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        assert (gradient - expected[name]).abs().max() <= 1e-4 * max(1, expected[name].abs().max()), name


@pytest.mark.parametrize("filled", [LENGTH, 25])
def test_the_loss_of_routers_is_the_one_that_transformers_adds(builder, materialised, theirs, fused, balanced, filled):
    made = builder(balanced, output_router_logits=True, router_aux_loss_coef=2.0)
    ours = materialised(made)
    other = theirs(made, ours)
    ids = tokens(2)
    mask = torch.ones_like(ids)
    mask[0, filled:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    loss = other(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False)
    assert loss.aux_loss > 1
    loss.loss.backward()
    with at_step_boundary(StepContext(aux_loss_scale=1 / mask.sum(), padding=mask == 0)):
        logits = ours(ids)
    functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()).backward()
    _assert_equal_gradients(fused, ours, other)
    ends = (".gate.weight", ".router.weight", ".router.layer.weight")
    router = next(name for name, _ in ours.named_parameters() if name.endswith(ends))
    plain = materialised(builder(balanced))
    logits = plain(ids)
    functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()).backward()
    assert (plain.get_parameter(router).grad - ours.get_parameter(router).grad).abs().max() > 1e-3


def test_a_micro_batch_of_padding_alone_has_no_loss_of_routers(builder, materialised):
    ours = materialised(builder("qwen3-moe", output_router_logits=True, router_aux_loss_coef=2.0))
    with at_step_boundary(StepContext(padding=torch.ones(1, LENGTH, dtype=torch.bool))):
        (0 * ours(tokens(1))).sum().backward()
    assert all(parameter.grad is None or parameter.grad.abs().max() == 0 for parameter in ours.parameters())


def test_packed_documents_are_kept_apart(builder, materialised, family):
    model = materialised(builder(family))
    ids, split = tokens(1), 25
    document_ids = (torch.arange(LENGTH) >= split).long()[None]
    positions = torch.cat([torch.arange(split), torch.arange(LENGTH - split)])[None]
    with torch.no_grad():
        packed = model(ids, positions, document_ids)
        alone = torch.cat([model(ids[:, :split]), model(ids[:, split:])], dim=1)
        mixed = model(ids, positions)
    assert (packed - alone).abs().max() <= 1e-5
    assert (packed - mixed).abs().max() > 1e-2


def test_rotary_tables_stay_in_full_precision_when_weights_do_not(builder):
    made = builder("gemma3")
    with torch.device("meta"):
        model = made.build().to(torch.bfloat16)
    model.to_empty(device="cpu").reset_buffers()
    expected = made.architecture.model_class(made.architecture.config).model.rotary_emb
    for name, table in expected.named_buffers():
        assert torch.equal(model.model.rotary_emb.get_buffer(name), table), name


def test_the_scale_of_gemmas_embeddings_is_rounded_as_transformers_rounds_it(builder, materialised, theirs):
    made = builder("gemma2", hidden_size=60, num_attention_heads=4)
    ours = materialised(made)
    other = theirs(made, ours).bfloat16()
    ids = tokens(1, 8)
    embedded = []
    ours.base_model.register_forward_pre_hook(
        lambda _, args, kwargs: embedded.append(kwargs["inputs_embeds"]), with_kwargs=True
    )
    ours.bfloat16()(ids)
    assert torch.equal(embedded[0], other.model.embed_tokens(ids))
