"""Layouts of two ranks against one process on the same device: losses, resumed runs, memory, texts of recorded passes,
a rank that is killed.

Where there are fewer devices than ranks, all ranks use the first one. NCCL refuses that, so gloo communicates. Its
collectives take tensors of GPUs. Its point-to-point transfers do not, and pass through the host.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from nxdt_testing.ranks import RankPool, RanksFailed
from torch.distributed import distributed_c10d

from accelerator.bench import GIB, Bench
from nxdt_core.data.tokenizers.byte import ByteTokenizer
from nxdt_core.distributed.devices import HOST, available_type, profile_of, register_profile
from nxdt_core.train import TrainSession
from nxdt_core.train.plan import plan
from nxdt_core.train.sampling import Sampling, Writer

__all__ = ["layouts"]

_SAVED, _STEPS = 2, 4
"""Steps before the checkpoint, and in all."""
_TOLERANCE = 1e-5
"""Largest difference of losses in float32."""
_STRATEGY = "distributed_strategy"
_LAYOUTS = {
    "recipe:llama-tiny": {
        "TP 2": (f"{_STRATEGY}.tensor_model_parallel_size=2", f"{_STRATEGY}.sequence_parallel=true"),
        "PP 2": (f"{_STRATEGY}.pipeline_model_parallel_size=2",),
        "ZeRO-1": (f"{_STRATEGY}.zero_stage=1",),
        "ZeRO-3": (f"{_STRATEGY}.zero_stage=3",),
        "CP 2": (f"{_STRATEGY}.context_parallel_size=2",),
    },
    "recipe:mixtral-tiny": {
        "EP 2": (f"{_STRATEGY}.expert_model_parallel_size=2",),
        "EP 2, ZeRO-3": (f"{_STRATEGY}.expert_model_parallel_size=2", f"{_STRATEGY}.zero_stage=3"),
    },
    "recipe:llama-tiny-lora": {
        "LoRA, TP 2": (f"{_STRATEGY}.tensor_model_parallel_size=2",),
        "LoRA, ZeRO-3": (f"{_STRATEGY}.zero_stage=3",),
    },
}
"""Recipe → name of a layout → its keys. Each resumes what the one before it has saved, and the first what the last has
saved."""
_SIZE = (
    "model.num_layers=8",
    "model.hidden_size=512",
    "model.ffn_hidden_size=1408",
    "model.num_attention_heads=8",
    "model.num_kv_heads=4",
    "data.seq_length=512",
    "model.max_position_embeddings=512",
)


def layouts(bench: Bench) -> None:
    """Train each model in one process and in each layout, as it is written and compiled."""
    for compiled in (False, True) if bench.compiles else (False,):
        for recipe, layouts_of in _LAYOUTS.items():
            _compare(bench, recipe, layouts_of, compiled=compiled)
    _kill(bench)


def _compare(bench: Bench, recipe: str, layouts_of: dict[str, Sequence[str]], *, compiled: bool) -> None:
    """Record how far the losses of each layout are from those of one process, before and after the resumed checkpoint,
    and the memory of its ranks."""
    title = ", compiled" if compiled else ""
    model = recipe.removeprefix("recipe:")
    whole: list[float] = []
    with bench.part(f"{recipe}{title}"):
        ((whole, memory, _),) = RankPool(1).run(_train, recipe, _keys(bench, model, compiled), _STEPS, timeout_s=300)
        bench.row(f"{recipe}{title}", last_loss=f"{whole[-1]:.6f}", measured_gib=_gib(memory))
    folders = {name: f"{model}-{number}" for number, name in enumerate(layouts_of)}
    planned: dict[str, int] = {}
    first: dict[str, tuple[list[float], list[int | None]]] = {}
    for name, keys in layouts_of.items() if whole else ():
        with bench.part(f"{name}{title}"):
            config = [*_keys(bench, folders[name], compiled), *keys, "trainer.devices=2"]
            results = RankPool(2).run(_train, recipe, config, _SAVED, timeout_s=300)
            first[name] = results[0][0], [memory for _, memory, _ in results]
            planned[name] = _planned(recipe, config)
    for (name, (losses, memory)), writer in zip(first.items(), (*list(first)[-1:], *list(first)[:-1]), strict=True):
        with bench.part(f"{name}{title}"):
            config = [*_keys(bench, folders[writer], compiled), *layouts_of[name], "trainer.devices=2"]
            resumed, _, same = RankPool(2).run(_train, recipe, config, _STEPS, timeout_s=300)[0]
            apart = [abs(one - two) for one, two in zip(whole, losses + resumed, strict=True)]
            bench.failed |= not (max(apart) <= _TOLERANCE and same)
            bench.row(
                f"{name}{title}",
                steps=len(apart),
                largest_difference=max(apart[:_SAVED]),
                resumed_of=writer,
                largest_difference_resumed=max(apart[_SAVED:]),
                same_text_recorded=same,
                planned_gib=_gib(planned[name]),
                measured_gib=", ".join(str(_gib(size)) for size in memory if size is not None),
            )


def _kill(bench: Bench) -> None:
    """Kill a rank after a checkpoint: its partner must end with an error, and two new ranks continue."""
    recipe, keys = "recipe:llama-tiny", [*_keys(bench, "killed", False), "trainer.devices=2"]
    what = "a rank is killed"
    with bench.part(what):
        ((whole, _, _),) = RankPool(1).run(_train, recipe, _keys(bench, "unharmed", False), _STEPS, timeout_s=300)
        RankPool(2).run(_train, recipe, keys, _SAVED, timeout_s=300)
        begun = time.monotonic()
        try:
            RankPool(2).run(_train, recipe, keys, _STEPS, True, timeout_s=120)
            outcome = "nothing was noticed"
        except RanksFailed as error:
            outcome = error.summary.partition("\n")[0][:120]
        seconds = time.monotonic() - begun
        resumed = RankPool(2).run(_train, recipe, keys, _STEPS, timeout_s=300)[0][0]
        apart = max(abs(one - two) for one, two in zip(whole[_SAVED:], resumed, strict=True))
        bench.failed |= seconds > 60 or outcome == "nothing was noticed" or not apart <= _TOLERANCE
        bench.row(what, outcome=outcome, seconds=seconds, largest_difference_resumed=apart)


def _keys(bench: Bench, name: str, compiled: bool) -> list[str]:
    return [
        f"name={name}{'-compiled' if compiled else ''}",
        f"exp_manager.exp_dir={bench.work / 'runs'}",
        "exp_manager.create_tensorboard_logger=false",
        "trainer.float32_matmul_precision=highest",
        "trainer.val_check_interval=null",
        f"model.compile={str(compiled).lower()}",
        "data.micro_batch_size=1",
        "data.global_batch_size=8",
        *(("model.num_layers=2",) if bench.small else _SIZE),
    ]


def _train(recipe: str, keys: Sequence[str], steps: int, dies: bool = False) -> tuple[list[float], int | None, bool]:
    """Train on this rank until ``steps``, from the run's checkpoint if it has one, and save if it has none.

    Returns:
        The losses, this rank's peak memory where its device is not the host, and what :func:`_writes_the_same` does.
    """
    world = int(os.environ["WORLD_SIZE"])
    device = available_type()
    if world > 1 and (device == HOST.type or torch.accelerator.device_count() < world):
        _share_device(device)
    with TrainSession.load(recipe, keys) as session:
        profile_of(session.engine.device).operations.reset_max_memory(session.engine.device)
        resumed = session.resume()
        losses = []
        for batch in session.batches():
            losses.append(float(session.step(batch).loss.loss))
            if dies and os.environ["RANK"] == "1":
                os.kill(os.getpid(), signal.SIGKILL)
            if session.state.step == steps:
                break
        if resumed is None:
            session.save()
        host = profile_of(session.engine.device).host
        return (
            losses,
            None if host else profile_of(session.engine.device).operations.max_memory_bytes(session.engine.device),
            _writes_the_same(session),
        )


def _writes_the_same(session: TrainSession) -> bool:
    """Return whether a text is the same with recorded passes, where the device and the layout have them, and without.
    Gloo's collectives cannot be recorded."""
    profile, strategy = profile_of(session.engine.device), session.config.run.distributed_strategy
    records = profile.records and (profile.process_group_backend != "gloo" or strategy.tensor_model_parallel_size == 1)
    writer, texts = Writer(model=session.model, tokenizer=ByteTokenizer(), window=128, stop_ids=()), []
    for recorded in (records, False):
        register_profile(replace(profile, records=recorded))
        texts.append([*writer.tokens([[72, 105], [73]], Sampling(max_new_tokens=40))])
    register_profile(profile)
    return texts[0] == texts[1]


def _share_device(device: str) -> None:
    """Let this rank use the first device, together with the others."""
    os.environ["LOCAL_RANK"] = "0"
    profile = profile_of(torch.device(device))
    if not profile.host:
        register_profile(
            replace(profile, process_group_backend="gloo", binds_process_group=False, symmetric_memory=False)
        )
    send, receive = dist.isend, dist.irecv

    def isend(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        return send(tensor.to("cpu", copy=True), *args, **options)

    def irecv(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        return _Received(tensor, torch.empty_like(tensor, device="cpu"), args, options)

    class _Received:
        def __init__(self, tensor: torch.Tensor, buffer: torch.Tensor, args: Any, options: Any) -> None:
            self._tensor, self._buffer, self._work = tensor, buffer, receive(buffer, *args, **options)

        def wait(self, *timeout: Any) -> bool:
            self._work.wait(*timeout)
            with torch.no_grad():
                self._tensor.copy_(self._buffer)
            return True

    for module in (dist, distributed_c10d):
        module.isend, module.irecv = isend, irecv  # type: ignore[attr-defined, assignment]


def _planned(recipe: str, keys: Sequence[str]) -> int:
    from nxdt_core.config import load

    return plan(load(recipe, keys), memory_bytes=0).estimate.fullest.memory.total


def _gib(size: int | None) -> float | None:
    return None if size is None else round(size / GIB, 3)
