"""The loss over logits that are cut by vocabulary equals that over whole ones: value, gradient, and what it ignores."""

import pytest
import torch
from nxdt_testing.errors import raises
from nxdt_testing.ranks import process_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from nxdt_core.engine.loss import vocabulary_parallel_cross_entropies
from nxdt_core.engine.model import objective_output
from nxdt_core.errors.models import LogitsAreSharded
from nxdt_core.models import loss as loss_module
from nxdt_core.models.loss import cross_entropy_sum, log_partition, log_probs
from nxdt_core.protocols.batch import Batch
from nxdt_core.protocols.objective import Objective, ObjectiveOutput
from nxdt_core.protocols.step_context import StepContext

VOCAB, ROWS = 12, (3, 5)
DTYPES = [torch.float64, torch.float32, torch.bfloat16]
SHARDED = StepContext(vocabulary_loss=vocabulary_parallel_cross_entropies)


@pytest.fixture(scope="session")
def ranks(new_ranks):
    return new_ranks


def logits_of(dtype: torch.dtype) -> torch.Tensor:
    """Large enough that a sum of exponentials without its maximum would overflow."""
    return (torch.randn(*ROWS, VOCAB, generator=torch.Generator().manual_seed(1)) * 60 + 700).to(dtype)


def labels_of() -> torch.Tensor:
    labels = torch.randint(0, VOCAB, ROWS, generator=torch.Generator().manual_seed(2))
    labels[0, :2] = -100
    labels[1] = -100
    labels[2, 0], labels[2, 1] = 0, VOCAB - 1
    return labels


def weights_of(weighted: bool) -> torch.Tensor | None:
    return torch.rand(ROWS, generator=torch.Generator().manual_seed(3)) if weighted else None


CASES = [(dtype, *case) for case in ((False, None), (True, 4)) for dtype in DTYPES]


def sharded_losses():
    """Of all cases, one after the other in the same processes."""
    with process_group():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        found = {}
        for dtype, weighted, chunk_rows in CASES:
            if chunk_rows is not None:
                loss_module._CHUNK_ELEMENTS_IN_CACHE = chunk_rows * VOCAB // 2
            part = logits_of(dtype).chunk(2, -1)[mesh.get_local_rank()].clone().requires_grad_()
            logits = DTensor.from_local(part, mesh, [Shard(-1)], run_check=False)
            loss_sum, weight = cross_entropy_sum(logits, labels_of(), weights_of(weighted), SHARDED)
            (loss_sum / 3).backward()
            found[dtype, weighted, chunk_rows] = loss_sum.detach(), weight, part.grad
        return found


@pytest.fixture(scope="module")
def by_rank(ranks):
    return ranks(2).run(sharded_losses)


@pytest.mark.parametrize(("dtype", "weighted", "chunk_rows"), CASES, ids=str)
def test_equals_the_loss_of_whole_logits(by_rank, dtype: torch.dtype, weighted: bool, chunk_rows: int | None) -> None:
    whole = logits_of(dtype).requires_grad_()
    loss_sum, weight = cross_entropy_sum(whole, labels_of(), weights_of(weighted))
    (loss_sum / 3).backward()
    outcomes = [found[dtype, weighted, chunk_rows] for found in by_rank]
    for rank, (rank_loss, rank_weight, grad) in enumerate(outcomes):
        torch.testing.assert_close(rank_loss, loss_sum.detach(), rtol=1e-12 if dtype == torch.float64 else 1e-6, atol=0)
        assert torch.equal(rank_weight, weight)
        assert grad.dtype == dtype
        torch.testing.assert_close(grad, whole.grad.chunk(2, -1)[rank])
        assert not grad[1].any()


def z_terms(logits: torch.Tensor, labels: torch.Tensor, step: StepContext | None = None) -> torch.Tensor:
    return (log_partition(logits, step).square() * labels.ne(-100)).sum() + log_probs(logits, labels, step).sum()


def sharded_z_terms():
    with process_group():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        found = {}
        for dtype in DTYPES:
            part = logits_of(dtype).chunk(2, -1)[mesh.get_local_rank()].clone().requires_grad_()
            total = z_terms(DTensor.from_local(part, mesh, [Shard(-1)], run_check=False), labels_of(), SHARDED)
            total.backward()
            found[dtype] = total.detach(), part.grad
        return found


def test_log_partition_and_log_probs_are_those_of_whole_logits(ranks) -> None:
    by_rank, labels = ranks(2).run(sharded_z_terms), labels_of()
    for dtype in DTYPES:
        whole, again = logits_of(dtype).requires_grad_(), logits_of(dtype).requires_grad_()
        z_terms(whole, labels).backward()
        wide = again.to(torch.promote_types(dtype, torch.float32))
        kept = labels.ne(-100)
        picked = wide.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1)
        expected = (wide.logsumexp(-1).square() * kept).sum() + (picked * kept).sum()
        expected.backward()
        torch.testing.assert_close(whole.grad, again.grad)
        for rank, found in enumerate(by_rank):
            total, grad = found[dtype]
            torch.testing.assert_close(total, expected.detach())
            torch.testing.assert_close(grad, again.grad.chunk(2, -1)[rank])


class ReadsLogits(Objective):
    """Computes with logits itself: next to a plain tensor, or alone."""

    def __init__(self, alone: bool) -> None:
        self.alone = alone

    def weight(self, batch: Batch) -> torch.Tensor:
        return batch.weight()

    def __call__(self, logits: torch.Tensor, batch: Batch) -> ObjectiveOutput:
        squares = logits.logsumexp(-1).square()
        loss = squares.sum() if self.alone else (squares * batch.labels.ne(-100)).sum()
        return ObjectiveOutput(loss_sum=loss, weight=batch.weight())


def refusals() -> list[str]:
    with process_group():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        labels = torch.zeros(1, 4, dtype=torch.int64)
        logits = DTensor.from_local(torch.zeros(1, 4, VOCAB // 2), mesh, [Shard(-1)], run_check=False)
        found = []
        for alone in (False, True):
            with raises(LogitsAreSharded) as raised:
                objective_output(ReadsLogits(alone), logits, Batch(input_ids=labels, labels=labels), SHARDED)
            found.append(str(raised.value))
        return found


def test_an_objective_that_computes_with_sharded_logits_is_refused(ranks) -> None:
    for mixed, alone in ranks(2).run(refusals):
        assert "objective ReadsLogits computes" in mixed
        assert "its loss_sum is a DTensor" in alone
        assert "log_partition" in mixed


def no_loss_token() -> tuple[float, float, bool]:
    with process_group():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        part = torch.randn(1, 4, VOCAB // 2, requires_grad=True)
        logits = DTensor.from_local(part, mesh, [Shard(-1)], run_check=False)
        loss_sum, weight = cross_entropy_sum(logits, torch.full((1, 4), -100), step=SHARDED)
        loss_sum.backward()
        return loss_sum.item(), weight.item(), bool(part.grad.any())


def test_batch_without_a_loss_token_is_zero(ranks) -> None:
    assert ranks(2).run(no_loss_token) == [(0.0, 0.0, False)] * 2


def complaints(label: int) -> list[str]:
    with process_group():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        labels = torch.full((1, 4), label)
        local = torch.zeros(1, 4, VOCAB // 2, requires_grad=True)
        cut, whole = (DTensor.from_local(local, mesh, [p], run_check=False) for p in (Shard(-1), Replicate()))
        found = []
        for loss, logits, targets in (
            (vocabulary_parallel_cross_entropies, cut, labels),
            (vocabulary_parallel_cross_entropies, whole, labels),
            (cross_entropy_sum, cut, labels.clamp(max=0)),  # without a context
        ):
            with pytest.raises((RuntimeError, IndexError, ValueError)) as raised:
                loss(logits, targets)
            found.append(str(raised.value))
        return found


def test_wrong_labels_and_layouts_fail_on_all_ranks(ranks) -> None:
    for found in ranks(2).run(complaints, VOCAB):
        assert "out of bounds" in found[0]
        assert "must be sharded by vocabulary" in found[1]
        assert "DTensor" in found[2]


def test_whole_logits_take_the_usual_loss_under_an_engine() -> None:
    logits, labels = torch.randn(2, 3, VOCAB), torch.tensor([[1, -100, 2], [0, 3, -100]])
    assert cross_entropy_sum(logits, labels, step=SHARDED) == cross_entropy_sum(logits, labels)
