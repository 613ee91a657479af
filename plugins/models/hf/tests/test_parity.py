"""The same numbers as transformers gives from the same weights, with its own attention."""

from __future__ import annotations

import pytest
import torch

FAMILIES = pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma2", "gemma3", "phi3", "olmo2"])
LENGTH = 40  # more than the windows of 16


def tokens(rows: int, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(0, 272, (rows, length), generator=torch.Generator().manual_seed(3))


@FAMILIES
def test_logits_and_gradients_equal_those_of_transformers(builder, materialised, theirs, family):
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
    gradients = {name: parameter.grad for name, parameter in other.named_parameters()}
    for name, parameter in ours.named_parameters():
        assert (parameter.grad - gradients[name]).abs().max() <= 1e-4 * max(1, gradients[name].abs().max()), name


@FAMILIES
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
    assert torch.equal(ours.bfloat16()._embedded(ids), other.model.embed_tokens(ids))
