"""The mixture of experts against a loop over tokens, in float64: outputs, auxiliary losses and every gradient."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from nxdt_core.models.mlp import SwiGLU
from nxdt_core.models.moe.experts import SwiGLUExperts
from nxdt_core.models.moe.layer import MixtureOfExperts
from nxdt_core.models.moe.router import TopKRouter
from nxdt_core.models.step_boundary import at_step_boundary
from nxdt_core.protocols.step_context import StepContext
from tests.sampling import slow

TIGHT = {"rtol": 1e-10, "atol": 1e-12}


def mixture(*, hidden=8, ffn=12, experts=4, top_k=2, shared=0, dtype=torch.float64, seed=0, **router):
    torch.manual_seed(seed)
    module = MixtureOfExperts(
        router=TopKRouter(hidden, experts, top_k=top_k, **router),
        experts=SwiGLUExperts(hidden, ffn, experts),
        shared=SwiGLU(hidden, shared) if shared else None,
    ).to(dtype)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return module


def dense_reference(module, hidden, padding=None):
    """(output, auxiliary loss) by the definitions, one token after the other, nothing shared with the module's code."""
    router, experts = module.router, module.experts
    tokens = hidden.reshape(-1, hidden.shape[-1])
    left_out = [False] * len(tokens) if padding is None else padding.flatten().tolist()
    count, number, top_k = left_out.count(False), len(router.weight), router.top_k
    capacity = math.inf
    if router.capacity_factor is not None:
        capacity = math.ceil(router.capacity_factor * len(tokens) * top_k / number)
    taken, chosen = [0] * number, [0] * number
    probability_sums = torch.zeros(number, dtype=hidden.dtype)
    z_loss = 0.0
    outputs = []
    for token, padded in zip(tokens, left_out, strict=True):
        if padded:
            outputs.append(torch.zeros_like(token) if module.shared is None else module.shared(token))
            continue
        logits = router.weight @ token
        probabilities = logits.exp() / logits.exp().sum()
        best = sorted(range(number), key=lambda e: -logits[e].item())[:top_k]
        weights = probabilities[best]
        if router.order == "topk_softmax":
            weights = logits[best].exp() / logits[best].exp().sum()
        elif router.normalize:
            weights = weights / weights.sum()
        output = torch.zeros_like(token)
        for weight, e in zip(weights, best, strict=True):
            chosen[e] += 1
            if taken[e] < capacity:
                taken[e] += 1
                gate = experts.gate_proj[e] @ token
                output = output + weight * (
                    experts.down_proj[e] @ (gate * torch.sigmoid(gate) * (experts.up_proj[e] @ token))
                )
        if module.shared is not None:
            output = output + module.shared(token)
        outputs.append(output)
        probability_sums = probability_sums + probabilities
        z_loss = z_loss + logits.exp().sum().log() ** 2
    balance = number * sum(c / (count * top_k) * p / count for c, p in zip(chosen, probability_sums, strict=True))
    aux = router.balance_coefficient * count * balance + router.z_coefficient * z_loss
    return torch.stack(outputs).view_as(hidden), aux


def gradients(module, hidden, loss):
    tensors = [hidden, *module.parameters()]
    names = ["hidden", *(name for name, _ in module.named_parameters())]
    found = torch.autograd.grad(loss, tensors, allow_unused=True)
    return {name: torch.zeros_like(t) if g is None else g for name, t, g in zip(names, tensors, found, strict=True)}


def assert_like_the_reference(module, hidden, padding=None):
    hidden.requires_grad_()
    grad_output = torch.randn_like(hidden)
    with at_step_boundary(StepContext(aux_loss_scale=0.5, padding=padding)):
        output = module(hidden)
    expected, aux = dense_reference(module, hidden, padding)
    torch.testing.assert_close(output, expected, **TIGHT)
    found = gradients(module, hidden, (output * grad_output).sum())
    reference = gradients(module, hidden, (expected * grad_output).sum() + 0.5 * aux)
    for name, value in reference.items():
        torch.testing.assert_close(found[name], value, **TIGHT, msg=lambda text, name=name: f"{name}: {text}")
    return found


ROUTERS = [
    {"order": "softmax_topk", "normalize": True},
    {"order": "softmax_topk", "normalize": False},
    {"order": "topk_softmax"},
]


@pytest.mark.parametrize("capacity_factor", [None, 0.6, 1.0, 8.0])
@pytest.mark.parametrize("router", ROUTERS, ids=["normalized", "plain", "topk-first"])
def test_outputs_and_gradients_are_the_definitions(router, capacity_factor):
    module = mixture(**router, capacity_factor=capacity_factor, balance_coefficient=0.3, z_coefficient=0.05, shared=6)
    found = assert_like_the_reference(module, torch.randn(2, 8, 8, dtype=torch.float64))
    assert all(value.abs().max() > 0 for value in found.values())


def padded_rows():
    """Hidden states [3, 8, 8] and which of them are padding: at the end, at the beginning, and a whole row."""
    padding = torch.zeros(3, 8, dtype=torch.bool)
    padding[0, 5:] = padding[1, :2] = padding[2] = True
    return torch.randn(3, 8, 8, dtype=torch.float64), padding


@pytest.mark.parametrize("capacity_factor", [None, 0.4])
@pytest.mark.parametrize("router", ROUTERS, ids=["normalized", "plain", "topk-first"])
def test_padding_goes_to_no_expert_and_counts_nowhere(router, capacity_factor):
    module = mixture(**router, capacity_factor=capacity_factor, balance_coefficient=0.3, z_coefficient=0.05, shared=6)
    hidden, padding = padded_rows()
    assert_like_the_reference(module, hidden, padding)
    found = module.router.statistics
    assert found.tokens == 11
    capacity = math.inf if capacity_factor is None else 5  # 0.4 · 24 · 2 / 4
    assert found.dropped == (found.assigned - capacity).clamp(min=0).sum()
    assigned, entropy = found.assigned.tolist(), found.entropy.clone()
    module(hidden[~padding][None])  # the same tokens without what is around them
    assert module.router.statistics.assigned.tolist() == assigned
    torch.testing.assert_close(module.router.statistics.entropy, entropy)


@pytest.mark.parametrize("capacity_factor", [None, 1.0])
def test_a_micro_batch_of_padding_alone_has_no_gradient(capacity_factor):
    module = mixture(capacity_factor=capacity_factor, balance_coefficient=0.3, z_coefficient=0.05)
    hidden = torch.randn(1, 6, 8, dtype=torch.float64, requires_grad=True)
    with at_step_boundary(StepContext(padding=torch.ones(1, 6, dtype=torch.bool))):
        module(hidden).backward(torch.randn_like(hidden))
    assert all(tensor.grad.abs().max() == 0 for tensor in (hidden, *module.parameters()))


@pytest.mark.parametrize("seed", range(20))
def test_random_small_configurations(seed):
    torch.manual_seed(seed)
    sizes = torch.randint(1, 7, (6,)).tolist()
    experts, top_k, ffn, hidden_size, batch, seq = sizes
    top_k = min(top_k, experts)
    router = ROUTERS[seed % 3]
    factor = [None, 0.5, 1.3][torch.randint(3, ()).item()]
    module = mixture(
        hidden=hidden_size, ffn=ffn, experts=experts, top_k=top_k, capacity_factor=factor, seed=seed, **router
    )
    assert_like_the_reference(module, torch.randn(batch, seq, hidden_size, dtype=torch.float64))


@pytest.mark.parametrize("capacity_factor", [None, 1.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_experts_without_tokens(dtype, capacity_factor):
    module = mixture(hidden=16, ffn=16, experts=4, top_k=1, dtype=dtype, capacity_factor=capacity_factor)
    with torch.no_grad():
        module.router.weight.zero_()
        module.router.weight[2] = 1.0  # tokens are positive, so that all choose this one
    hidden = torch.rand(1, 6, 16).to(dtype).requires_grad_()
    module(hidden).float().square().sum().backward()
    for matrix in module.experts.parameters():
        assert matrix.grad.isfinite().all()
        assert matrix.grad[2].abs().sum() > 0
        assert matrix.grad[[0, 1, 3]].abs().sum() == 0


class LateTokens:
    """As a rank sees it before whose tokens so many others come that every expert is full."""

    shards, segments, copies = 4, 1, 1

    def count(self, counts):
        return torch.full_like(counts, 10_000), counts.sum((0, 1))


def test_everything_dropped():
    module = mixture(capacity_factor=1.0)
    module.router.shards = LateTokens()
    hidden = torch.randn(2, 4, 8, dtype=torch.float64, requires_grad=True)
    output = module(hidden)
    assert output.abs().max() == 0
    output.backward(torch.randn_like(output))
    assert hidden.grad.abs().max() == 0
    assert all(parameter.grad.abs().max() == 0 for parameter in module.parameters())
    assert module.router.statistics.dropped == 2 * 4 * 2


def test_earlier_positions_go_first():
    """One expert, room for half of the tokens: the second row finds it full."""
    module = mixture(experts=2, top_k=1, capacity_factor=1.0)
    with torch.no_grad():
        module.router.weight.zero_()
        module.router.weight[1] = 1.0
    output = module(torch.rand(2, 3, 8, dtype=torch.float64))
    assert (output[0].abs().sum(-1) > 0).all()
    assert output[1].abs().max() == 0


def test_capacity_is_rounded_up_from_the_exact_share():
    from nxdt_core.models.moe.router import expert_capacity

    assert expert_capacity(1.1, tokens=10, top_k=1, experts=1) == 11
    assert expert_capacity(1.25, tokens=10, top_k=2, experts=4) == 7
    assert expert_capacity(0.01, tokens=10, top_k=1, experts=8) == 1


def test_statistics_are_detached_sums():
    module = mixture(capacity_factor=0.5)
    hidden = torch.randn(2, 8, 8, dtype=torch.float64)
    module(hidden)
    statistics = module.router.statistics
    logits = hidden.view(-1, 8) @ module.router.weight.t()
    assert statistics.assigned.tolist() == torch.bincount(logits.topk(2).indices.flatten(), minlength=4).tolist()
    assert statistics.dropped == (statistics.assigned - 4).clamp(min=0).sum()  # capacity 0.5 · 16 · 2 / 4
    entropies = torch.distributions.Categorical(logits=logits).entropy()
    torch.testing.assert_close(statistics.entropy, entropies.sum())
    assert statistics.tokens == 16
    assert not statistics.entropy.requires_grad


def test_balanced_routing_has_a_loss_of_one_a_token():
    from nxdt_core.models.moe.router import balance_loss_sum

    for top_k in (1, 2):
        uniform, assigned = torch.full((2, 6, 4), 0.25), torch.full((4,), 12 * top_k // 4)
        assert balance_loss_sum(uniform, assigned) == pytest.approx(12.0)
    collapsed = functional.one_hot(torch.zeros(2, 6, dtype=torch.int64), 4).float()
    assert balance_loss_sum(collapsed, torch.tensor([12, 0, 0, 0])) == 48.0


def test_the_router_computes_in_float32_whatever_surrounds_it():
    """Logits that bfloat16 cannot tell apart choose the better expert all the same."""
    router = TopKRouter(16, 2, top_k=1).to(torch.bfloat16)
    with torch.no_grad():
        router.weight[0], router.weight[1] = 1.0, 1.0
        router.weight[1, 0] = 1.0 + 2**-7
    hidden = torch.full((1, 1, 16), 8.0, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        routing = router(hidden)
    assert routing.weights.dtype == torch.float32
    assert routing.experts.tolist() == [[1]]
    torch.testing.assert_close(routing.weights, torch.sigmoid(torch.tensor([[2**-4]])))


def test_autocast_reaches_the_experts():
    module = mixture(hidden=16, ffn=16, dtype=torch.float32)
    seen = []
    module.experts.activation.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        module(torch.randn(1, 6, 16))
    assert seen == [torch.bfloat16]


@pytest.mark.parametrize("capacity_factor", [None, 1.0])
def test_recomputation_changes_no_gradient(capacity_factor):
    module = mixture(balance_coefficient=0.3, z_coefficient=0.05, capacity_factor=capacity_factor)
    hidden = torch.randn(2, 4, 8, dtype=torch.float64, requires_grad=True)
    grad = torch.randn_like(hidden)
    with at_step_boundary(StepContext(aux_loss_scale=0.25)):
        plain = module(hidden)
        recomputed = torch.utils.checkpoint.checkpoint(module, hidden, use_reentrant=False)
    expected = gradients(module, hidden, (plain * grad).sum())
    for name, value in gradients(module, hidden, (recomputed * grad).sum()).items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=0)


@pytest.mark.parametrize(("top_k", "factor"), [(0, None), (5, None), (1, 0.0), (1, -1.0)])
def test_impossible_routers_are_refused(top_k, factor):
    with pytest.raises(ValueError, match="top_k" if factor is None else "capacity_factor"):
        TopKRouter(8, 4, top_k=top_k, capacity_factor=factor)


def test_no_gradient_without_grad_mode():
    module = mixture(balance_coefficient=0.3)
    with torch.no_grad():
        assert not module(torch.randn(1, 4, 8, dtype=torch.float64)).requires_grad


@pytest.mark.parametrize(
    ("capacity_factor", "dtype"),
    [(None, torch.float32), slow(None, torch.bfloat16), slow(1.0, torch.float32), (1.0, torch.bfloat16)],
)
def test_a_traced_mixture_computes_the_same(capacity_factor, dtype):
    module = mixture(
        hidden=16, ffn=16, dtype=dtype, capacity_factor=capacity_factor, balance_coefficient=0.3, z_coefficient=0.05
    )
    hidden = torch.randn(2, 4, 16).to(dtype).requires_grad_()
    grad = torch.randn_like(hidden)
    with at_step_boundary(StepContext(aux_loss_scale=0.25)):
        plain = module(hidden)
        traced = torch.compile(module, backend="aot_eager")(hidden)
    torch.testing.assert_close(traced, plain)
    expected = gradients(module, hidden, (plain * grad).sum())
    for name, value in gradients(module, hidden, (traced * grad).sum()).items():
        torch.testing.assert_close(value, expected[name])
