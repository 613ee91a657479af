"""The library's interleaved pipeline schedule over stages that are cut by hand, several on each rank.

Its schedule, messages and losses know several stages of a rank. What does not (commit fbac349): a manual partition
has one stage on each rank (``pipeline/model.py``, 394 to 476 and 1140), and its schedule of forward alone runs each
rank's first one only (``pipeline/scheduler.py``, ``InferenceSchedule``).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from neuronx_distributed.pipeline import NxDPPModel
from neuronx_distributed.pipeline.manual_pipe_stage import PipelineStageModule
from neuronx_distributed.pipeline.partition import PipelineIO
from neuronx_distributed.pipeline.scheduler import (
    ForwardPostprocessTask,
    ForwardPreprocessTask,
    ForwardStepTask,
    PipeSchedule,
)

__all__ = ["InterleavedModel"]


class InterleavedModel(NxDPPModel):  # type: ignore[misc]  # the library has no types
    """Runs ``virtual_pipeline_size`` stages on each rank; stage s is on rank s modulo the number of ranks."""

    def _create_manual_partition(self, module: list[Any], partition_fn: Any) -> None:
        super()._create_manual_partition(module, partition_fn)  # the first stage of each rank
        stages = self.pipeline_parallel_size * self.virtual_pipeline_size
        own = [self.get_current_stage(chunk) for chunk in range(self.virtual_pipeline_size)]
        self.local_stage_modules += [
            PipelineStageModule(layers=module, num_stages=stages, stage_index=stage, partition_fn=partition_fn)
            for stage in own[1:]
        ]
        for stage in range(self.pipeline_parallel_size, stages):
            received = PipelineIO(name="hidden states", input_idx=0, output_idx=0, metadata=None, obj=[])
            self.stage_id_to_IO_input_names[stage] = OrderedDict({f"stage_{stage}_input": received})
        self.stage_id_to_input_count |= dict.fromkeys(own, 1)
        self.stage_id_to_output_count |= dict.fromkeys(own, 1)

    def create_schedule(self) -> None:
        """Make the schedules of training, where the ranks divide the micro-batches, and of forward alone."""
        place = self.pipeline_parallel_size, self.pipeline_parallel_rank
        if self.num_microbatches % self.pipeline_parallel_size == 0:
            super().create_schedule()
        self.eval_scheduler = _ForwardSchedule(self.num_microbatches, *place, chunks=self.virtual_pipeline_size)

    def _create_model_inputs_and_labels_iter(self, input_kwargs: Any) -> None:
        super()._create_model_inputs_and_labels_iter(input_kwargs)
        self.model_labels_iter[self.virtual_pipeline_size - 1] = self.model_labels_iter[0]


class _ForwardSchedule(PipeSchedule):  # type: ignore[misc]
    """Forward alone, one micro-batch after the other through all stages, for any number of them."""

    def __init__(self, micro_batches: int, stages: int, stage_id: int, *, chunks: int) -> None:
        super().__init__(micro_batches, stages, stage_id)
        self._chunks = chunks

    def steps(self) -> Iterator[list[Any]]:
        """Yield the tasks of each micro-batch in each stage of this rank."""
        for number in range(self.num_microbatches):
            for chunk in range(self._chunks):
                kinds = (ForwardPreprocessTask, ForwardStepTask, ForwardPostprocessTask)
                yield [kind(number, model_chunk=chunk) for kind in kinds]
