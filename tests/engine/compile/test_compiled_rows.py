"""The compiled passes over logits: torch's cross-entropy and its gradient, without a copy in full precision."""

import re
from functools import partial

import pytest
import torch
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes import post_grad
from torch._inductor.pattern_matcher import PatternMatcherPass, fwd_only, register_replacement
from torch._inductor.utils import run_and_get_code
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from nxdt_core.engine.loss import _sums, compiled_rows, linear_cross_entropies
from nxdt_core.models.loss import IN_CHUNKS, cross_entropy_sum, whole_vocabulary_cross_entropies
from nxdt_core.protocols.step_context import StepContext
from tests.integer_widths import IntegerWidths

ROWS, VOCAB = 24, 96


class Operations(TorchDispatchMode):
    """The names of the operations that run."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


def logits_of(dtype):
    return (4 * torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(0))).to(dtype).requires_grad_()


def labels_of():
    labels = torch.randint(0, VOCAB, (ROWS,), generator=torch.Generator().manual_seed(1))
    labels[:5] = -100
    return labels


def loss_by(kernels, logits):
    """Sum and weight of the losses, as an engine computes them with ``kernels``."""
    step = StepContext(vocabulary_loss=partial(whole_vocabulary_cross_entropies, kernels=kernels))
    return cross_entropy_sum(logits, labels_of(), step=step)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_sum_and_gradient_are_those_of_torch(dtype):
    logits, labels = logits_of(dtype), labels_of()
    total, weight = loss_by(compiled_rows("aot_eager"), logits)
    (gradient,) = torch.autograd.grad(total / 3, logits)
    reference = logits.detach().to(total.dtype).requires_grad_()
    expected = functional.cross_entropy(reference, labels, reduction="sum")
    torch.testing.assert_close(total, expected)
    assert weight == ROWS - 5
    assert gradient.dtype == dtype
    torch.testing.assert_close(gradient, torch.autograd.grad(expected / 3, reference)[0].to(dtype))


def test_a_dispatch_mode_sees_the_operations_of_sum_and_gradient():
    logits, labels = logits_of(torch.float32), labels_of()
    with Operations() as seen:
        total, _ = loss_by(compiled_rows("aot_eager"), logits)
        total.backward()
    assert {"aten.amax.default", "aten.exp.default"} <= seen.names
    expected = functional.cross_entropy(logits, labels, reduction="sum")
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(logits.grad, torch.autograd.grad(expected, logits)[0])


def test_the_kernels_of_a_context_compute_its_gradients():
    logits = logits_of(torch.float32)
    used = []

    def gradients(*args):
        used.append(args)
        return IN_CHUNKS.gradients(*args)

    total, _ = loss_by(type(IN_CHUNKS)(IN_CHUNKS.sums, gradients), logits)
    total.backward()
    assert len(used) == 1


@pytest.mark.parametrize("tokens", [7, ROWS])
def test_a_head_that_computes_its_losses_uses_them(tokens):
    hidden = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(2)).requires_grad_()
    weight = torch.randn(VOCAB, 8, generator=torch.Generator().manual_seed(3)).requires_grad_()
    labels = labels_of()
    kernels = compiled_rows("aot_eager")
    losses = linear_cross_entropies(hidden, weight, None, labels, tokens=tokens, kernels=kernels)
    found = torch.autograd.grad(losses[labels >= 0].sum(), (hidden, weight))
    expected = functional.cross_entropy(hidden @ weight.t(), labels, reduction="sum")
    torch.testing.assert_close(losses[labels >= 0].sum(), expected)
    torch.testing.assert_close(found, torch.autograd.grad(expected, (hidden, weight)))


def test_compiled_passes_have_integers_of_one_width():
    found = IntegerWidths()
    torch._dynamo.reset()
    with torch._dynamo.config.patch(assume_static_by_default=False):
        loss_by(compiled_rows(found), logits_of(torch.bfloat16))[0].backward()
    assert (found.dynamic, found.found) == (2, [])


def test_inductor_finds_the_online_softmax_in_the_sums():
    """Its pass chooses GPUs alone, and lets Triton read each row once."""
    passes = PatternMatcherPass()
    example = [torch.empty(4, 8)]
    arguments = (post_grad.prepare_softmax_pattern, post_grad.prepare_softmax_replacement, example, fwd_only, passes)
    register_replacement(*arguments, scalar_workaround={"dim": -1})
    logits, columns = logits_of(torch.bfloat16).detach(), labels_of().clamp(min=0)
    graph = make_fx(_sums, decomposition_table=select_decomp_table())(logits, columns, torch.float32)
    assert passes.apply(graph) == 1


@pytest.mark.slow  # two kernels of inductor, from their C++
def test_compiled_code_allocates_no_copy_of_the_logits():
    logits, columns = logits_of(torch.bfloat16).detach(), labels_of().clamp(min=0)
    kernels = compiled_rows("inductor")
    (sums, at), forward = run_and_get_code(kernels.sums, logits, columns, torch.float32)
    out, hits, scale = torch.empty_like(logits), -torch.ones(ROWS), torch.full((ROWS,), 0.5)
    _, backward = run_and_get_code(kernels.gradients, logits, columns, sums, hits, scale, out)
    allocated = [re.findall(r"= empty_strided\w*\(\(([^)]*)\)", code) for code in (*forward, *backward)]
    assert allocated[0]
    assert not [shape for shapes in allocated for shape in shapes if f"{VOCAB}" in shape]
    expected_sums, expected_at = IN_CHUNKS.sums(logits, columns, torch.float32)
    torch.testing.assert_close((sums, at), (expected_sums, expected_at))
    expected = IN_CHUNKS.gradients(logits, columns, sums, hits, scale, torch.empty_like(out))
    torch.testing.assert_close(out, expected)
