"""The loss without whole logits equals that of whole ones: by itself, in every kind of layout, and for nothing else."""

from functools import cache

import pytest
import torch
from nxdt_testing.errors import raises
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from nxdt_core.engine.loss import chunk_loss, linear_cross_entropies
from nxdt_core.errors.models import HeadNotLinear, LossesAreNotLogits, ModelWithoutHead
from nxdt_core.models.loss import TokenLosses, cross_entropy_sum, head_output
from nxdt_core.models.step_boundary import at_step_boundary
from nxdt_core.protocols.plan import ParallelPlan
from nxdt_core.protocols.step_context import StepContext
from tests.engine.matrix.judgement import computed_wrong
from tests.engine.matrix.layouts import Layout
from tests.engine.matrix.training import Report, configuration, train
from tests.sampling import sampled

BATCH, SEQ, HIDDEN, VOCAB = 3, 7, 10, 50
PLAN = ParallelPlan(tensor={"head": "vocab_head"})
LLAMA = {
    "name": "llama",
    "hidden_size": 32,
    "ffn_hidden_size": 40,
    "num_attention_heads": 4,
    "num_kv_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 24,
    "init_method_std": 0.1,
}
TIED = {**LLAMA, "share_embeddings_and_output_weights": True, "logits_softcap": 0.5}
CHUNKED, TIED_CHUNKED = {**LLAMA, "loss_chunk_tokens": 20}, {**TIED, "loss_chunk_tokens": 20}
STEPS = 8
LAYOUTS = (
    Layout(),
    Layout(dp=2, zero=3),
    Layout(tp=2),
    Layout(tp=4, sp=True),
    Layout(pp=2),
    Layout(pp=2, zbv=True),
    Layout(pp=2, vpp=2, tp=2),
    Layout(cp=2, cp_method="ring", packed=True),
    Layout(dp=2, tp=2, zero=3),
    Layout(pp=2, tied=True),
    Layout(tp=2, sp=True, tied=True),
    Layout(dp=2, zero=3, tied=True),
)
SAMPLE = 2


def pytest_generate_tests(metafunc):
    if "layout" in metafunc.fixturenames:
        layouts = sampled(metafunc.config, LAYOUTS, SAMPLE, default=LAYOUTS[-2:-1])
        metafunc.parametrize("layout", layouts, ids=[layout.name for layout in layouts])


def labels_of() -> torch.Tensor:
    labels = torch.randint(0, VOCAB, (BATCH, SEQ), generator=torch.Generator().manual_seed(2))
    labels[0, :2] = -100
    labels[1] = -100
    return labels


def head_and_hidden(dtype: torch.dtype, *, bias: bool) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(1)
    module = nn.ModuleDict({"head": nn.Linear(HIDDEN, VOCAB, bias=bias)}).to(dtype)
    return module, torch.randn(BATCH, SEQ, HIDDEN).to(dtype).requires_grad_()


def loss_and_gradients(
    module: nn.Module, hidden: torch.Tensor, weights: torch.Tensor | None, softcap: float | None = None
) -> list[torch.Tensor]:
    labels = labels_of()
    outputs = head_output(module["head"], hidden, StepContext(labels=labels), softcap=softcap)
    loss, weight = cross_entropy_sum(outputs, labels, weights)
    return [loss.detach(), weight, *torch.autograd.grad(loss / 3, [hidden, *module.parameters()])]


@pytest.mark.parametrize("tokens", [1, 4, 21, 1000])
@pytest.mark.parametrize(("bias", "weighted"), [(False, False), (True, True)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_equals_the_loss_of_whole_logits(dtype, bias, weighted, tokens):
    module, hidden = head_and_hidden(dtype, bias=bias)
    weights = torch.rand(BATCH, SEQ, generator=torch.Generator().manual_seed(3)) if weighted else None
    whole = loss_and_gradients(module, hidden, weights)
    chunk_loss(module, PLAN, tokens=tokens)
    chunked = loss_and_gradients(module, hidden, weights)
    for found, expected in zip(chunked, whole, strict=True):
        assert found.dtype == expected.dtype
        # Gradients in bfloat16 are rounded once a chunk, whole ones once.
        rough = dtype == torch.bfloat16 and found.ndim
        torch.testing.assert_close(found, expected, rtol=2e-2 if rough else 1e-6, atol=1e-2 if rough else 1e-6)


@pytest.mark.parametrize("tokens", [4, 1000])
def test_equals_the_loss_of_whole_capped_logits(tokens):
    module, hidden = head_and_hidden(torch.float64, bias=True)
    whole = loss_and_gradients(module, hidden, None, 0.7)
    capped = 0.7 * torch.tanh(module["head"](hidden) / 0.7)
    expected = functional.cross_entropy(capped.flatten(0, 1), labels_of().flatten(), reduction="sum")
    torch.testing.assert_close(whole[0], expected.detach())
    chunk_loss(module, PLAN, tokens=tokens)
    torch.testing.assert_close(loss_and_gradients(module, hidden, None, 0.7), whole)
    torch.testing.assert_close(head_output(module["head"], hidden, None, softcap=0.7), capped)


def test_autocast_computes_as_the_head_does():
    module, hidden = head_and_hidden(torch.float32, bias=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        whole = loss_and_gradients(module, hidden, None)
        chunk_loss(module, PLAN, tokens=4)
        chunked = loss_and_gradients(module, hidden, None)
    assert torch.equal(chunked[0], whole[0])
    assert [found.dtype for found in chunked] == [expected.dtype for expected in whole]
    torch.testing.assert_close(chunked[2:], whole[2:], rtol=2e-2, atol=1e-2)


def test_a_frozen_head_takes_no_gradient():
    _, hidden = head_and_hidden(torch.float32, bias=False)
    weight = torch.randn(VOCAB, HIDDEN)
    losses = linear_cross_entropies(hidden, weight, None, labels_of().clamp(min=0), tokens=4)
    losses.sum().backward()
    expected = functional.cross_entropy(hidden.detach().flatten(0, 1) @ weight.T, labels_of().clamp(min=0).flatten())
    torch.testing.assert_close(losses.mean(), expected)
    assert hidden.grad.any()


def test_no_tensor_is_as_large_as_all_logits():
    module, hidden = head_and_hidden(torch.float32, bias=True)
    sizes = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            results = result if isinstance(result, (tuple, list)) else (result,)
            sizes.extend(tensor.numel() for tensor in results if isinstance(tensor, torch.Tensor))
            return result

    for tokens in (None, 4):
        sizes.clear()
        if tokens is not None:
            chunk_loss(module, PLAN, tokens=tokens)
        with Watch():
            loss_and_gradients(module, hidden, None)
        assert max(sizes) == (BATCH * SEQ * VOCAB if tokens is None else VOCAB * HIDDEN)


def test_without_a_loss_to_follow_the_head_gives_logits():
    module, hidden = head_and_hidden(torch.float32, bias=True)
    expected = module["head"](hidden)
    chunk_loss(module, PLAN, tokens=4)
    assert torch.equal(module["head"](hidden), expected)
    assert torch.equal(head_output(module["head"], hidden, StepContext()), expected)


def test_a_head_whose_caller_passes_no_context_takes_the_labels_of_the_border():
    module, hidden = head_and_hidden(torch.float32, bias=True)
    chunk_loss(module, PLAN, tokens=4)
    with at_step_boundary(StepContext(labels=labels_of())):
        assert isinstance(module["head"](hidden), TokenLosses)


@pytest.mark.parametrize(
    "use",
    [
        lambda losses, labels: losses.softmax(-1),
        lambda losses, labels: losses + 1,
        lambda losses, labels: functional.cross_entropy(losses, labels),
        lambda losses, labels: losses[0],
        lambda losses, labels: losses.to(torch.float64),
        lambda losses, labels: cross_entropy_sum(losses, labels.clone()),
    ],
)
def test_losses_are_not_taken_for_logits(use):
    module, hidden = head_and_hidden(torch.float32, bias=False)
    chunk_loss(module, PLAN, tokens=4)
    labels = labels_of()
    losses = head_output(module["head"], hidden, StepContext(labels=labels))
    assert isinstance(losses, TokenLosses)
    with raises(LossesAreNotLogits, match=r"loss_chunk_tokens\), and the objective or the model itself"):
        use(losses, labels)


def test_heads_that_cannot_be_chunked_are_refused():
    with raises(ModelWithoutHead):
        chunk_loss(nn.ModuleDict({"head": nn.Linear(2, 2)}), ParallelPlan(), tokens=4)
    with raises(HeadNotLinear, match="'head' is a Sequential"):
        chunk_loss(nn.ModuleDict({"head": nn.Sequential()}), PLAN, tokens=4)
    chunk_loss(nn.ModuleDict({"head": nn.Identity()}), PLAN, tokens=4)  # of a stage that is not the last


@pytest.fixture(scope="module")
def alone(ranks, steps):
    """``alone(layout, layers)``: what one process reports that holds all logits; ``layout`` is that of one."""

    @cache
    def run(layout: Layout, layers: int) -> Report:
        model = {**(TIED if layout.tied else LLAMA), "num_layers": layers}
        (report,) = ranks(1).run(train, layout, "float64", steps(STEPS), model, timeout_s=120)
        return report

    return run


def test_a_layout_trains_as_one_process_with_whole_logits_does(ranks, alone, steps, layout):
    model = {**(TIED_CHUNKED if layout.tied else CHUNKED), "num_layers": layout.least_layers}
    assert configuration(layout, "float64", model).run.model.loss_chunk_tokens == 20
    reports = ranks(layout.world).run(train, layout, "float64", steps(STEPS), model, timeout_s=120)
    wrong = computed_wrong("float64", reports, alone(layout.one_process, layout.least_layers))
    assert not wrong, "\n".join(wrong)
