"""Loads the device type of ``abacus.cpp`` into this process, when it is imported, and describes it to nxdt."""

from __future__ import annotations

import os
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future
from torch._dynamo import register_backend

from nxdt_core.distributed.device_operations import DeviceOperations
from nxdt_core.distributed.devices import DeviceProfile
from tests.distributed.building import CACHE, library

__all__ = ["COMPILED", "NAME", "PROFILE", "waits"]

NAME = "abacus"

COMPILED: list[str] = []
"""Device types of the inputs of each graph that was compiled."""


def waits() -> int:
    """How often this process has read a value of the device so far, without the copies of its all-to-all."""
    return int(torch.ops.abacus.waits()) - _Group.waited


class _Queue:
    """A stream or an event of a device that works in the order in which it is asked."""

    def __init__(self, *args: object, **keywords: object) -> None:
        pass

    def wait_stream(self, stream: object) -> None:
        pass

    def wait_event(self, event: object) -> None:
        pass

    def record_event(self, event: object = None) -> _Queue:
        return _Queue()

    def record(self, stream: object = None) -> None:
        pass

    def wait(self, stream: object = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class _Module:
    """What torch finds as ``torch.abacus``: what FSDP2 and device meshes need of a device."""

    Stream = Event = _Queue

    @staticmethod
    def is_initialized() -> bool:
        return True

    @staticmethod
    def set_device(device: object) -> None:
        torch.accelerator.set_device_index(torch.device(device).index if isinstance(device, str) else device)

    @staticmethod
    def current_stream(device: object = None) -> _Queue:
        return _Queue()

    @staticmethod
    def stream(stream: object) -> nullcontext[None]:
        return nullcontext()

    @staticmethod
    def synchronize(device: object = None) -> None:
        pass

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def device_count() -> int:
        return 2  # kDevices of the library; torch.accelerator asks this method

    @staticmethod
    def current_device() -> int:
        return torch.accelerator.current_device_index()

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @staticmethod
    def manual_seed_all(seed: int) -> None:
        pass

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.bfloat16]


class _Operations(DeviceOperations):
    """It has no generator."""

    def rng_state(self, device: torch.device) -> None:
        """Return None."""

    def name(self, device: torch.device) -> str:
        """Return the name of the product."""
        return "Abacus 2"


torch.ops.load_library(str(library(Path(os.environ[CACHE]))))
torch.utils.rename_privateuse1_backend(NAME)
torch._register_device_module(NAME, _Module)
torch.utils.generate_methods_for_privateuse1_backend()


@register_backend(name=NAME)
def _compile(graph: torch.fx.GraphModule, inputs: list[object]) -> object:
    """Run a graph as it is, and count it."""
    COMPILED.append(next(each.device.type for each in inputs if isinstance(each, torch.Tensor)))
    return graph.forward


class _Group(dist.ProcessGroup):
    """Collectives of the device: those of the host, over copies. It has no sends, and its profile no all-to-all."""

    waited = 0
    """Copies to the host that an all-to-all has made, which devices do without."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._host = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:
        """Return the name of the backend."""
        return NAME

    @property
    def group_name(self) -> str:
        """Return the name under which torch has registered the group."""
        return dist.distributed_c10d._world.pg_names[self]

    def allreduce(self, tensors, opts=None):
        """Sum, or another operation."""
        return self._in_place(self._host.allreduce, tensors, opts or dist.AllreduceOptions())

    def broadcast(self, tensors, opts=None):
        """From one rank to all."""
        return self._in_place(self._host.broadcast, tensors, opts or dist.BroadcastOptions())

    def _allgather_base(self, output, tensor, opts=None):
        """All tensors, one after the other."""
        held = torch.empty(output.shape, dtype=output.dtype)
        self._host._allgather_base(held, tensor.cpu()).wait()
        output.copy_(held)
        return _done(output)

    def _reduce_scatter_base(self, output, tensor, opts=None):
        """This rank's part of the sum."""
        held = tensor.cpu()
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.SUM
        self._host.allreduce([held], options).wait()
        part = held.flatten().chunk(self.size())[self.rank()].view(output.shape)
        output.copy_(part / self.size() if opts is not None and opts.reduceOp == dist.ReduceOp.AVG else part)
        return _done(output)

    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base
    """Names since torch 2.13."""

    def allgather(self, outputs, tensors, opts=None):
        """All tensors, each in its own."""
        held = [[torch.empty(each.shape, dtype=each.dtype) for each in group] for group in outputs]
        self._host.allgather(held, [tensor.cpu() for tensor in tensors]).wait()
        for group, copies in zip(outputs, held, strict=True):
            for each, copy in zip(group, copies, strict=True):
                each.copy_(copy)
        return _done(outputs)

    def alltoall_base(self, output, tensor, output_splits, input_splits, opts=None):
        """Rows of each rank to each."""
        held = torch.empty(output.shape, dtype=output.dtype)
        self._host.alltoall_base(held, tensor.cpu(), output_splits, input_splits).wait()
        _Group.waited += 1
        output.copy_(held)
        return _done(output)

    all_to_all_single = alltoall_base

    def barrier(self, opts=None):
        """Wait for all ranks."""
        return self._host.barrier()

    def _in_place(self, collective, tensors, opts):
        held = [tensor.cpu() for tensor in tensors]
        collective(held, opts).wait()
        for tensor, copy in zip(tensors, held, strict=True):
            tensor.copy_(copy)
        return _done(tensors)


def _done(result: object) -> dist.Work:
    future: torch.futures.Future[object] = torch.futures.Future()
    future.set_result(result)
    return _create_work_from_future(future)


def _create_group(store: dist.Store, rank: int, size: int, timeout: timedelta) -> _Group:
    return _Group(store, rank, size, timeout)


dist.Backend.register_backend(NAME, _create_group, devices=[NAME])

PROFILE = DeviceProfile(
    device_type=NAME,
    process_group_backend=NAME,
    operations=_Operations(),
    host_random=True,
    static_shapes=True,
    point_to_point=False,
    all_to_all=False,
    context_parallel_method="gather",
    compile_backend=NAME,
    peak_flops={"Abacus": {"float32": 1e12}},
)
"""As of an accelerator that compiles for fixed shapes."""
