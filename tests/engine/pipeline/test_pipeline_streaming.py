"""What a pipeline holds and sends, steps of changing shape, forward alone, and errors that keep their name."""

import gc
from collections import Counter
from dataclasses import dataclass

import pytest
import torch
from nxdt_testing.errors import raises
from nxdt_testing.ranks import RanksFailed, process_group
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from nxdt_core.distributed.torch_versions import fsdp_parameter_groups
from nxdt_core.engine.pipeline.schedules import Operation, schedule_operations
from nxdt_core.engine.pipeline.stage import StreamedStage
from nxdt_core.errors.layouts import MicroBatchesDoNotFit
from nxdt_core.errors.models import SequenceTooLongForModel
from nxdt_core.models.loss import cross_entropy_sum
from nxdt_core.protocols.batch import Batch
from nxdt_core.protocols.precision import PrecisionPolicy
from nxdt_core.protocols.step_context import StepContext
from tests.at_rest import at_rest
from tests.engine.pipeline.cases import (
    Case,
    arguments,
    build,
    close,
    materialise,
    micro_batch,
    pipeline,
    whole,
)
from tests.sampling import slow, slow_except

SCHEDULES = ("1f1b", "interleaved", "zbv")
MIXED = PrecisionPolicy(name="mixed", parameters="bfloat16", master_weights=True)


@pytest.fixture(scope="session")
def ranks(new_ranks):
    return new_ranks


class Alive:
    """Counts tensors whose memory is held at a time, by whomever."""

    def __init__(self):
        self.most = self.total = 0
        self._storages = []

    def watch(self, tensor):
        self._storages.append(StorageWeakRef(tensor.untyped_storage()))
        self.total += 1
        self.most = max(self.most, self.now())

    def now(self):
        return sum(not storage.expired() for storage in self._storages)


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched(Batch):
    """A micro-batch whose copies on the device are counted."""

    alive: Alive

    def to(self, device, non_blocking=True):
        fields = ("input_ids", "labels", "position_ids", "document_ids")
        moved = {name: getattr(self, name).clone() for name in fields}
        self.alive.watch(moved["labels"])
        return Batch(**moved)


def peaks(case):
    """Of micro-batches on the device, hidden states received and those sent: the most, all, those left at the end."""
    with process_group():
        run = pipeline(case)
        ids, received, sent = Alive(), Alive(), Alive()
        run.batches = [
            Watched(
                input_ids=b.input_ids,
                labels=b.labels,
                position_ids=b.position_ids,
                document_ids=b.document_ids,
                alive=ids,
            )
            for b in run.batches
        ]
        for number, stage in run.stages.items():
            if number > 0:
                stage.register_forward_pre_hook(lambda module, args: received.watch(args[0]))
            if number < case.sizes.stages - 1:
                stage.register_forward_hook(lambda module, args, output: sent.watch(output))
        run.step()
        gc.collect()
        return [(alive.most, alive.total, at_rest(alive.now)) for alive in (ids, received, sent)]


@pytest.mark.parametrize("schedule", slow_except(SCHEDULES, ("zbv",)))
def test_micro_batches_and_hidden_states_are_held_while_they_are_in_flight_only(ranks, schedule):
    count = 16
    case = Case(schedule=schedule, micro_batches=count)
    for ids, received, sent in ranks(2).run(peaks, case):
        assert ids[1] == count
        assert {received[1], sent[1]} <= {0, count, 2 * count}
        for most, total, left in (ids, received, sent):
            assert most <= 9, "a few of 16 or 32"
            assert left == 0
            assert most >= 1 or not total


def executed(case):
    """The operations of one step in the order in which they ran here."""
    log = []

    def logged(name, kind):
        stock = getattr(StreamedStage, name)

        def method(stage, index, *args, **kwargs):
            log.append(Operation(kind(kwargs), stage.stage_index, index))
            return stock(stage, index, *args, **kwargs)

        setattr(StreamedStage, name, method)

    logged("forward_one_chunk", lambda kwargs: "forward")
    logged("backward_one_chunk", lambda k: "backward" if k.get("full_backward", True) else "backward_input")
    logged("backward_weight_one_chunk", lambda kwargs: "backward_weight")
    with process_group():
        pipeline(case).step()
    return log


@pytest.mark.parametrize("schedule", slow_except(SCHEDULES, ("zbv",)))
def test_ranks_run_the_operations_that_bubbles_are_counted_from(ranks, schedule):
    case = Case(schedule=schedule, micro_batches=6)
    assert ranks(2).run(executed, case) == schedule_operations(schedule, case.pp, case.vpp, case.micro_batches)


def gradients_of(case, counts_and_lengths):
    """Gradients by parameter after a step of micro-batches of the given lengths, for each of several steps."""
    with process_group():
        run = pipeline(case)
        found = []
        for lengths in counts_and_lengths:
            run.batches = [micro_batch(index, length=length) for index, length in enumerate(lengths)]
            run.weight = sum(batch.weight() for batch in run.batches)
            run.step()
            found.append(
                {name: p.grad.clone() for stage in run.stages.values() for name, p in stage.named_parameters()}
            )
        return found


@pytest.mark.parametrize("schedule", slow_except(SCHEDULES, ("zbv",)))
def test_steps_may_differ_in_number_and_length_of_micro_batches(ranks, schedule):
    case = Case(schedule=schedule)
    steps = [(12, 12, 12, 12), (9, 16, 11, 12, 12, 7), (16, 16, 16, 16)]
    results = ranks(2).run(gradients_of, case, steps)
    for step, lengths in enumerate(steps):
        module = build(case)
        materialise(module, case)
        batches = [micro_batch(index, length=length) for index, length in enumerate(lengths)]
        weight = sum(batch.weight() for batch in batches)
        for batch in batches:
            logits = module(batch.input_ids, **arguments(batch))
            (cross_entropy_sum(logits, batch.labels)[0] / weight).backward()
        for found in results:
            for name, gradient in found[step].items():
                close(gradient, module.get_parameter(name).grad)


def forward_everywhere(case, shapes):
    """All logits, on every rank."""
    with process_group():
        run = pipeline(case)
        batches = [micro_batch(index, rows, length) for index, (rows, length) in enumerate(shapes)]
        logits = run.runner.forward(
            batches, lambda batch: StepContext(), lambda logits, batch, _: (logits, batch.labels.shape)
        )
        assert bool(logits) == run.runner.holds_last
        assert all(shape == batch.labels.shape for (_, shape), batch in zip(logits, batches, strict=False))
        rows = [value for value, _ in logits] or [None] * len(batches)
        return [run.runner.broadcast_from_last(value) for value in rows]


@pytest.mark.parametrize("schedule", slow_except(SCHEDULES, ("interleaved",)))
@pytest.mark.parametrize("shapes", [[(1, 7)], [(2, 12), (1, 5), (3, 9), (1, 1), (2, 16)]], ids=len)
def test_forward_takes_any_number_and_shape_of_micro_batches(ranks, schedule, shapes):
    case = Case(schedule=schedule)
    module = build(case)
    materialise(module, case)
    results = ranks(2).run(forward_everywhere, case, shapes)
    for index, (rows, length) in enumerate(shapes):
        batch = micro_batch(index, rows, length)
        with torch.no_grad():
            expected = module(batch.input_ids, **arguments(batch))
        for found in results:
            close(found[index], expected)


class Collectives(TorchDispatchMode):
    """Counts collectives by name."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            self.counts[function._opname] += 1
        return function(*args, **(kwargs or {}))


def collectives(cases):
    """For each case: groups of parameters that FSDP2 has here, reduce-scatters and all-gathers of the second step, and
    how many of the groups are the model's ends: the embedding, or the head with its norm.
    """
    with process_group():
        found = []
        for case in cases:
            run = pipeline(case)
            run.step()
            with Collectives() as mode:
                run.step()
            groups = {
                id(group)  # that of the norm and the head is one
                for stage in run.stages.values()
                for part in stage.modules()
                if isinstance(part, FSDPModule)
                for group in fsdp_parameter_groups(part._get_fsdp_state())
            }
            ends = sum(len({"embed_tokens", "lm_head"} & _with_weights(stage)) for stage in run.stages.values())
            found.append((len(groups), mode.counts["alltoall_base_"], mode.counts["_allgather_base_"], ends))
        return found


def _with_weights(stage):
    return {name for name, part in stage.named_children() if any(True for _ in part.parameters())}


@pytest.mark.parametrize("schedule", slow_except(SCHEDULES, ("zbv",)))
def test_zero_stages_reduce_and_gather_as_often_as_they_promise(ranks, schedule):
    if schedule == "zbv" and not hasattr(DeviceMesh, "_unflatten"):
        pytest.skip("torch 2.9 cannot run it, and `nxdt config check` refuses it there")
    cases = [Case(schedule=schedule, dp_shard=2, zero_stage=stage, micro_batches=2) for stage in (1, 2, 3)]
    count = cases[0].micro_batches
    for stage_1, stage_2, stage_3 in ranks(4).run(collectives, cases):
        groups, _, _, ends = stage_1
        assert stage_1 == (groups, groups, groups, ends)
        assert stage_2 == (groups, groups * count, groups, ends)
        # A layer is gathered for forward and for backward, an end once.
        assert stage_3 == (groups, groups * count, (groups * 2 - ends) * count, ends)


def mixed_gradients(case):
    with process_group():
        run = pipeline(case)
        run.step()
        return {name: whole(p.grad) for stage in run.stages.values() for name, p in stage.named_parameters()}


def gathered_at_first_forward(cases):
    """For each case: how many layers' weights are whole when the rank runs its first layer."""
    with process_group():
        found = []
        for case in cases:
            run = pipeline(case)
            layers = [layer for stage in run.stages.values() for layer in stage.layers.values()]
            seen = []

            def look(module, args, layers=layers, seen=seen):
                whole_ones = [layer for layer in layers if not isinstance(next(layer.parameters()), DTensor)]
                seen.append(len(whole_ones))

            for layer in layers:
                layer.register_forward_pre_hook(look)
            run.step()
            found.append(seen[0])
        return found


@pytest.mark.parametrize("schedule", slow_except(SCHEDULES, ("zbv",)))
def test_zero_3_gathers_a_layer_when_it_runs(ranks, schedule):
    cases = [Case(schedule=schedule, dp_shard=2, zero_stage=stage, layers=8, micro_batches=2) for stage in (1, 3)]
    for gathered_1, gathered_3 in ranks(4).run(gathered_at_first_forward, cases):
        assert gathered_3 == 1
        assert gathered_1 == (1 if schedule == "1f1b" else 2)  # looped schedules gather their stage of two layers ahead


@pytest.mark.parametrize("schedule", [slow("1f1b"), "zbv"])
def test_gradients_of_bfloat16_weights_add_up_in_float32(ranks, schedule):
    """In the pipeline as in one process whose gradients of each micro-batch are added in float32. (Sums of two of them
    in bfloat16 would be off by up to 0.4 %.)"""
    case = Case(schedule=schedule, dp_shard=2, precision=MIXED)
    expected = {}
    module = build(case)
    materialise(module, case)
    module.to(torch.bfloat16)
    if hasattr(FSDPModule, "finalize_backward"):  # from 2.15 FSDP2 asks autograd for gradients that were never rounded
        for parameter in module.parameters():
            parameter.grad_dtype = torch.float32
    batches = [micro_batch(index) for index in range(2 * case.micro_batches)]
    for batch in batches:
        module.zero_grad()
        logits = module(batch.input_ids, **arguments(batch))
        (cross_entropy_sum(logits, batch.labels)[0] / sum(b.weight() for b in batches)).backward()
        for name, parameter in module.named_parameters():
            expected[name] = expected.get(name, 0) + parameter.grad.float()
    for found in ranks(4).run(mixed_gradients, case):
        for name, gradient in found.items():
            assert gradient.dtype == torch.float32
            torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-6)


def too_long(module, args):
    raise SequenceTooLongForModel(sequence=12, longest=4)


@pytest.mark.parametrize("schedule", slow_except(SCHEDULES, ("1f1b",)))
def test_an_error_within_a_stage_keeps_its_name_and_words(ranks, schedule):
    with pytest.raises(RanksFailed, match=r"\[NXDT-M052\] Sequences have 12 tokens") as failed:
        ranks(2).run(step_with_an_error, Case(schedule=schedule))
    assert "Step 0" not in str(failed.value)  # stock logs its whole schedule


def step_with_an_error(case):
    with process_group():
        run = pipeline(case)
        if 0 in run.stages:
            run.stages[0].register_forward_pre_hook(too_long)
        run.step()


def count_wrongly(case):
    with process_group():
        run = pipeline(case)
        run.batches = [micro_batch(index) for index in range(5)]
        with raises(MicroBatchesDoNotFit) as refused:
            run.step()
        run.batches = [micro_batch(index) for index in range(4)]
        run.step()
        return str(refused.value)


def test_a_step_with_a_number_that_does_not_fit_is_refused_and_the_next_runs(ranks):
    for said in ranks(2).run(count_wrongly, Case(schedule="interleaved")):
        assert "rounds of one size, of 2 or more, micro-batches per step, and there are 5" in said
