"""The differences between device types, in one table. No other file of the core names a device type.

Peak figures are dense FLOP/s as the vendors' data sheets state them: NVIDIA A100 80GB, H100 SXM, H200, L4, L40S. Links
are those of NVIDIA's DGX and HGX machines. Figures of AWS Trainium are in
:mod:`nxdt_core.distributed.device_operations`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.overrides import TorchFunctionMode

from nxdt_core.distributed.device_operations import (
    MEMORY_GIB,
    PEAK_FLOPS,
    DeviceOperations,
    HostOperations,
    TrainiumOperations,
    UnknownDeviceOperations,
)
from nxdt_core.errors.launch import AcceleratorMissing, BadDeviceProfile, UnknownAccelerator
from nxdt_core.kernel.plugin import BUILTIN

if TYPE_CHECKING:
    from nxdt_core.config import ResolvedConfig
    from nxdt_core.config.schema import TrainerConfig

__all__ = [
    "EXPANDABLE",
    "HOST",
    "DeviceProfile",
    "Links",
    "available_type",
    "configure_allocator",
    "current_device",
    "groups_on_device",
    "meta_device",
    "peak_flops",
    "profile_of",
    "register_profile",
    "register_profile_of",
]

HOST = torch.device("cpu")
"""The host: it reads batches, writes checkpoints and draws random numbers."""
EXPANDABLE = "expandable_segments:True"
"""Setting of an allocator whose segments grow (``trainer.expandable_segments``)."""


_T, _G = 1e12, 1e9


_RANDOM_FILLS = (
    *(torch.Tensor.normal_, torch.nn.init.normal_, torch.Tensor.uniform_),
    *(torch.nn.init.uniform_, torch.nn.init.kaiming_uniform_),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Bandwidths between the processes of a product: bytes per second of one process, in one direction."""

    processes: int
    """Processes of one machine, which are connected by ``inside``."""
    inside: float
    outside: float
    """Bandwidth between machines: the share of one process in its machine's network adapters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProfile:
    """Facts about one device type."""

    device_type: str
    """Name of the device type, as ``torch.device.type`` has it."""
    process_group_backend: str
    operations: DeviceOperations = field(default_factory=DeviceOperations)
    """Operations that processes call at run time."""
    host: bool = False
    """Tensors are in host memory; the device then has no separate memory or random number generator."""
    cache_bound_kernels: bool = False
    """A core's cache paces kernels, rather than launches do: few passes and small chunks win."""
    float64: bool = False
    """The device computes in float64; initial weights are then drawn on it rather than on the host."""
    fused_optimizers: bool = False
    """``torch.optim`` has fused kernels for the device."""
    point_to_point: bool = True
    """Two ranks can send to each other without the rest of their group."""
    binds_process_group: bool = False
    """The default process group gets its device when it starts. It then connects at once, as NCCL can."""
    all_to_all: bool = True
    """The process group has an all-to-all; otherwise one is made of gathers, which send more."""
    reduce_scatter: bool = True
    """The process group has a reduce-scatter that sends no more than the parts. Gloo's sums the whole tensor on every
    rank, which sends twice as much."""
    symmetric_memory: bool = False
    """Processes on one machine can read one another's memory (``torch.distributed._symmetric_memory``), as
    ``distributed_strategy.async_tensor_parallel`` needs."""
    pinned_host_memory: bool = False
    """Pinned memory makes copies between host and device faster, and lets them run in parallel with kernels."""
    reduced_float32_matmul: bool = False
    """Float32 matrix products can run in a shorter format (TF32), for ``trainer.float32_matmul_precision``."""
    gc_interval: int = 0
    """Steps between two garbage collections where ``trainer.gc_interval`` is not set; 0 leaves them to Python."""
    allocator_variables: tuple[str, ...] = ()
    """Environment variables that configure its allocator, if that has expandable segments; the first is the one to set,
    and a process that has any of them keeps it."""
    broadcast_loads: bool = False
    """Ranks get values that others hold as well faster from one of them than from the store of a checkpoint."""
    host_random: bool = False
    """Random numbers are drawn on the host, since the device has no generator, or none that can be seeded."""
    lazy: bool = False
    """Operations are recorded and run later, so that a tensor has no address until it is copied to the host."""
    records: bool = False
    """Kernels can be recorded once and launched together, by :meth:`DeviceOperations.recorded`."""
    static_shapes: bool = False
    """A new shape means a compilation that takes minutes, so that each graph is compiled for fixed shapes."""
    compile_backend: str = "inductor"
    """Backend of ``torch.compile``, which differentiates graphs by AOTAutograd: torch 2.11's ``eager``, which does not,
    loses gradients of collectives."""
    context_parallel_method: Literal["ring", "gather"] = "ring"
    """Default of how context parallelism moves keys and values."""
    attention_kernel: Literal["composed", "masked_flash", "flash_or_efficient"] = "composed"
    """Attention with a log-sum-exp (:mod:`~nxdt_core.models.attention.partial_attention`), which context parallelism
    merges; ``composed`` is matrix products and runs anywhere."""
    block_attention: tuple[str, ...] = ()
    """Names of the dtypes in which attention to packed documents runs by blocks of keys
    (:mod:`~nxdt_core.models.attention.documents`); in others it runs under a mask."""
    shared_heads: tuple[str, ...] | None = None
    """Names of the dtypes in which fused attention without a mask takes one head of keys and values for several of
    queries. In others, and with a mask, torch would keep all scores instead. None: it takes them always."""
    grouped_products: tuple[str, ...] = ()
    """Names of the dtypes in which ``torch.nn.functional.grouped_mm`` reads the offsets of its groups on the device; in
    others it would copy them to the host, once for each product. The host itself reads them in all."""
    grouped_generations: tuple[int, ...] = ()
    """Major compute capabilities of the devices with :attr:`grouped_products`; none: all devices of the type."""
    peak_flops: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Part of the device's name → dtype name → dense FLOP/s of one device; longer parts are tried first."""
    memory_gib: Mapping[str, float] = field(default_factory=dict)
    """Name of a product → memory of the part that one process has, for ``nxdt plan --device``."""
    links: Mapping[str, Links] = field(default_factory=dict)
    """Name of a product → its connections in the machine that it is usually sold in; none: it is not known."""
    install: str = "the build of torch for that device"
    """Software that a machine needs so that torch finds the device."""

    @property
    def sums_by_exchange(self) -> bool:
        """Return whether a reduce-scatter is made of an all-to-all and a sum."""
        return self.all_to_all and not self.reduce_scatter

    @property
    def never_waits(self) -> bool:
        """Return whether a step must not read a value of the device, which ends a graph or empties the queue of
        graphs."""
        return self.lazy or self.static_shapes


_HGX_H100 = Links(processes=8, inside=450 * _G, outside=50 * _G)
"""Half of NVLink's 900 GB/s, which counts both directions, and an adapter of 400 Gbit/s for each GPU."""

CPU = DeviceProfile(
    device_type="cpu",
    process_group_backend="gloo",
    operations=HostOperations(),
    host=True,
    cache_bound_kernels=True,
    float64=True,
    fused_optimizers=True,
    reduce_scatter=False,
    attention_kernel="masked_flash",
)
"""The host."""

CUDA = DeviceProfile(
    device_type="cuda",
    process_group_backend="nccl",
    binds_process_group=True,
    symmetric_memory=True,
    float64=True,
    fused_optimizers=True,
    pinned_host_memory=True,
    reduced_float32_matmul=True,
    records=True,
    gc_interval=50,
    allocator_variables=("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"),
    broadcast_loads=True,
    attention_kernel="flash_or_efficient",
    block_attention=("float32", "bfloat16", "float16"),
    shared_heads=("bfloat16", "float16"),  # flash attention and cuDNN
    grouped_products=("bfloat16",),
    grouped_generations=(9, 10),  # Hopper and Blackwell, torch 2.13
    peak_flops={
        "A100": {"float32": 19.5 * _T, "bfloat16": 312 * _T},
        "H100": {"float32": 67 * _T, "bfloat16": 989.4 * _T},
        "H200": {"float32": 67 * _T, "bfloat16": 989.4 * _T},
        "L40S": {"float32": 91.6 * _T, "bfloat16": 362 * _T},
        "L4": {"float32": 30.3 * _T, "bfloat16": 121 * _T},
    },
    memory_gib={"A100": 80, "H100": 80, "H200": 141, "L40S": 48, "L4": 24},
    links={
        "A100": Links(processes=8, inside=300 * _G, outside=25 * _G),
        "H100": _HGX_H100,
        "H200": _HGX_H100,
    },
    install="a build of torch for the version of CUDA that the driver has",
)
"""GPUs of NVIDIA."""

NEURON = DeviceProfile(
    device_type="neuron",
    process_group_backend="neuron",
    point_to_point=False,  # send and receive are documented, and not tried yet; nothing needs them but the ring
    context_parallel_method="gather",
    gc_interval=50,
    broadcast_loads=True,
    static_shapes=True,
    compile_backend="neuron",
    operations=TrainiumOperations(),
    peak_flops=PEAK_FLOPS,
    memory_gib=MEMORY_GIB,
    install="torch-neuronx of torch's version from AWS (2.13.* with torch 2.13) on trn2 and trn3, or an engine over "
    "torch-xla on trn1",
)
"""AWS Trainium under torch-neuronx."""

PROFILES: MutableMapping[str, DeviceProfile] = {"cpu": CPU, "cuda": CUDA, "neuron": NEURON}
"""Profiles by device type; :func:`register_profile` adds to them."""

_UNLISTED = DeviceProfile(
    device_type="unlisted",
    process_group_backend="undefined",
    operations=UnknownDeviceOperations(),
    lazy=True,
    host_random=True,
)


def register_profile(profile: DeviceProfile) -> None:
    """Let this process know a device type by ``profile``, in place of any that it knew before.

    A run registers the component of kind ``device`` that ``trainer.accelerator`` selects by itself.
    """
    PROFILES[profile.device_type] = profile


def register_profile_of(config: ResolvedConfig) -> None:
    """Register the profile of the device type that ``trainer.accelerator`` names, if a plugin brings it.

    ``auto`` means the accelerator that torch finds. Building an engine does this first.

    Raises:
        AmbiguousComponent: several do, and ``plugins.prefer`` names none of them.
        BadDeviceProfile: what the plugin's record names is not a profile of that type.
    """
    registry, wanted = config.kernel.registry, config.run.trainer.accelerator
    if wanted == "auto":
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator is None or accelerator.type not in registry.names("device"):
            return
        wanted = accelerator.type
    component = registry.get("device", wanted)
    if component.plugin == BUILTIN:
        return
    profile = component.load_target()
    if not isinstance(profile, DeviceProfile) or profile.device_type != wanted:
        raise BadDeviceProfile(
            accelerator=wanted,
            plugin=component.plugin,
            reference=component.record.target,
            found=f"a profile of {profile.device_type!r}" if isinstance(profile, DeviceProfile) else repr(profile),
        )
    register_profile(profile)


def current_device(accelerator: str = "auto", *, index: int | None = None) -> torch.device:
    """Return the device that this process trains on.

    Args:
        accelerator: ``auto`` (the accelerator that torch finds, else the CPU) or a device type.
        index: which of the machine's devices, mostly the local rank; None for the current one.

    Raises:
        UnknownAccelerator: no such device type in the table.
        AcceleratorMissing: torch finds no such device on this machine.
    """
    wanted = available_type() if accelerator == "auto" else accelerator
    if wanted not in PROFILES:
        raise UnknownAccelerator(accelerator=wanted, known=tuple(PROFILES))
    profile = PROFILES[wanted]
    if profile.host:
        return torch.device(wanted)
    if not profile.operations.is_available(wanted):
        raise AcceleratorMissing(accelerator=wanted, found=available_type(), install=profile.install)
    number = profile.operations.current_index() if index is None else index
    return torch.device(wanted) if number is None else torch.device(wanted, number)


def configure_allocator(trainer: TrainerConfig, profile: DeviceProfile) -> None:
    """Set the variable of the device's allocator for this process and those that it starts, unless the user has.

    The allocator reads it when the device is first used, not when torch is imported.
    """
    names = profile.allocator_variables
    if names and trainer.expandable_segments is not False and not any(name in os.environ for name in names):
        os.environ[names[0]] = EXPANDABLE


def available_type() -> str:
    """Return the type of the accelerator that torch finds here and a profile describes; else that of the host."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator.type if accelerator is not None and accelerator.type in PROFILES else HOST.type


def profile_of(device: torch.device) -> DeviceProfile:
    """Return the table's row for ``device``; for a type that the table does not list (meta, or another engine's) a row
    that promises nothing. A dictionary look-up: building blocks ask in every forward."""
    return PROFILES.get(device.type, _UNLISTED)


def groups_on_device(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether ``grouped_mm`` of matrices of ``dtype`` runs on ``device`` without a wait of the host."""
    profile = profile_of(device)
    if profile.host:
        return True
    if str(dtype).removeprefix("torch.") not in profile.grouped_products:
        return False
    return not profile.grouped_generations or profile.operations.generation(device) in profile.grouped_generations


@contextmanager
def meta_device() -> Iterator[None]:
    """Make tensors on the meta device within the block. What fills them with random numbers does nothing there.

    Torch has these functions for that device as Python functions, which take more time than the rest of a layer's
    construction. That of ``normal_`` imports ``torch._dynamo``: one CPU-second.
    """
    with torch.device("meta"), _WithoutRandomFills():
        yield


class _WithoutRandomFills(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if func in _RANDOM_FILLS:
            tensor = args[0] if args else named["tensor"]
            if tensor.is_meta:  # a block may draw on the host, too
                return tensor
        return func(*args, **named)


def peak_flops(device: torch.device, dtype: str) -> float | None:
    """Dense FLOP/s of ``device`` in ``dtype``, or None where the table does not know it (any CPU)."""
    table = profile_of(device).peak_flops
    if not table:
        return None
    name = profile_of(device).operations.name(device) or device.type
    match = max((part for part in table if part.lower() in name.lower()), key=len, default=None)
    return None if match is None else table[match].get(dtype)
