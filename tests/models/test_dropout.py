"""Dropout by itself: how much, when, and from which random numbers."""

import pytest
import torch

from nxdt_core.models.attention.grouped_query import CausalAttention
from nxdt_core.models.random.dropout import (
    CausalAttentionWithDropout,
    Dropout,
    EmbeddingNoise,
    MaskPart,
    causal_attention,
    encoded_name,
)
from nxdt_core.protocols.step_context import StepContext
from tests.sampling import slow


def test_it_zeroes_its_part_and_scales_the_rest():
    dropout = Dropout(0.25)
    given = dropout(torch.ones(200, 200))
    assert (given == 0).float().mean().item() == pytest.approx(0.25, abs=0.01)
    assert torch.equal(given[given != 0], torch.full_like(given[given != 0], 1 / 0.75))


@pytest.mark.parametrize("salt", [None, 5])
def test_evaluation_drops_nothing(salt):
    dropout = Dropout(0.5).eval()
    dropout.salt = salt
    hidden = torch.randn(4, 4)
    assert torch.equal(dropout(hidden), hidden)


def test_masks_follow_from_salt_and_generator_and_change_from_call_to_call():
    one, same, other = Dropout(0.5), Dropout(0.5), Dropout(0.5)
    one.salt, same.salt, other.salt = 1, 1, 2
    hidden = torch.ones(8, 8)

    def calls(dropout):
        torch.manual_seed(3)
        return [dropout(hidden), dropout(hidden)]

    first, second = calls(one)
    assert not torch.equal(first, second)
    assert all(torch.equal(a, b) for a, b in zip(calls(same), (first, second), strict=True))
    assert not torch.equal(calls(other)[0], first)


def test_a_generator_that_is_set_back_repeats_the_masks():
    dropout = Dropout(0.5)
    dropout.salt = 7
    dropout(torch.ones(8))
    state = torch.get_rng_state()
    expected = [dropout(torch.ones(8)) for _ in range(3)]
    torch.set_rng_state(state)
    assert all(torch.equal(dropout(torch.ones(8)), wanted) for wanted in expected)


@pytest.mark.parametrize("documents", [slow(None), torch.tensor([[0, 0, 0, 1, 1, 1]])], ids=["one", "packed"])
def test_attention_drops_probabilities_and_is_right_on_average(documents):
    torch.manual_seed(0)
    query, key, value = torch.randn(1, 4, 6, 8), torch.randn(1, 2, 6, 8), torch.rand(1, 2, 6, 8)
    core = CausalAttentionWithDropout(0.3)
    core.salt = 1
    exact = CausalAttention()(query, key, value, documents)
    rows = [None if each is None else each.expand(300, *each.shape[1:]) for each in (query, key, value, documents)]
    mean = torch.cat([core(*rows) for _ in range(10)]).mean(0, keepdim=True)  # each row of a batch draws for itself
    torch.testing.assert_close(mean, exact, rtol=0, atol=0.06)  # five standard errors
    assert not torch.equal(core(query, key, value, documents), exact)
    assert torch.equal(core.eval()(query, key, value, documents), exact)


def test_without_probability_the_core_is_the_one_that_can_be_replaced():
    assert type(causal_attention(0.0)) is CausalAttention


def test_noise_on_embeddings_is_that_of_neftune():
    """Uniform, as strong as transformers', while training; by the step, and again in the same one."""
    neftune = pytest.importorskip("transformers.integrations.neftune")
    noise, embedding = EmbeddingNoise(15.0), torch.zeros(4, 64, 96)
    noise.part = MaskPart(name=encoded_name("embed_noise"))
    ids = torch.zeros(4, 64, dtype=torch.int64)
    first, again, later = (
        noise(embedding, StepContext(numbers=torch.tensor((1, step, 0)), ids=ids)) for step in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, later)
    assert not torch.equal(first[0], first[1])
    hooked = torch.nn.Embedding(1, 1)
    hooked.neftune_noise_alpha = 15.0
    theirs = neftune.neftune_post_forward_hook(hooked, None, embedding)
    for found in (first, noise(embedding)):
        assert float(found.abs().max()) == pytest.approx(float(theirs.abs().max()), rel=1e-2)
        assert float(found.std()) == pytest.approx(float(theirs.std()), rel=2e-2)
        assert float(found.mean()) == pytest.approx(0, abs=float(theirs.std()) / 50)
    assert torch.equal(noise.eval()(embedding), embedding)
