"""Wrong pipelines that the comparison with one process must find; each is put in place in a rank's own process."""

from torch.distributed.pipelining import PipelineStage

from nxdt_core.engine.pipeline import split
from tests.engine.pipeline import cases


def divide_gradients_by_micro_batches():
    """What the stock schedules do unless they are told not to (``scale_grads``)."""
    stock = PipelineStage.perform_reduce_grad
    PipelineStage.perform_reduce_grad = lambda stage, factor: stock(stage, cases.Case.micro_batches)


def leave_tied_gradients_apart():
    cases.sum_tied_gradients = lambda copies, group: None


def drop_a_layer():
    """The last layer of the first stage is on no stage."""
    stock = split.stage_layers

    def shares(layers, count, cuts):
        first, *others = stock(layers, count, cuts)
        return [first[:-1], *others]

    split.stage_layers = shares
