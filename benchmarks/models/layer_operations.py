"""What one layer of a Llama costs: operations, kernels, saved bytes and graphs, compared with other frameworks.

Claim: no more kernels in forward and backward than transformers' layer of the same shape and no more saved bytes;
status 1 where that does not hold. Counts do not depend on the machine or on how busy it is.

    python benchmarks/models/layer_operations.py

torchtitan is counted where it can be imported, which needs 0.2.2: the last version with
``scaled_dot_product_attention`` (``pip install --target FOLDER --no-deps torchtitan==0.2.2``, and FOLDER in
PYTHONPATH with the packages that it then misses). Each figure is that of a model with three layers less that of one
with two. Operations are what reaches the dispatcher, without compilation; kernels leave out views and allocations.
Saved bytes count each storage once and leave out parameters and buffers. Graphs are those of five steps with each
layer compiled in place, by a backend that only counts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from importlib.metadata import version
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from nxdt_core.config import load
from nxdt_core.train import build
from nxdt_core.train.step import initialize_parallel_model

ROWS, TOKENS, WIDTH, HEADS, INNER, VOCABULARY = 2, 128, 256, 16, 768, 2048
STEPS = 5


class Counts(NamedTuple):
    """Of a model, or of a layer."""

    operations: int
    forward: int
    backward: int
    saved: int

    def less(self, other: Counts) -> Counts:
        return Counts(*(mine - theirs for mine, theirs in zip(self, other, strict=True)))


class Operations(TorchDispatchMode):
    """Counts what reaches the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.all = self.kernels = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_view = any(part.alias_info and not part.alias_info.is_write for part in function._schema.returns)
        self.all += 1
        self.kernels += not is_view and not function.name().startswith("aten::empty")
        return function(*args, **(kwargs or {}))


def nxdt(layers: int) -> nn.Module:
    """Return the model of a run, laid out by its engine."""
    keys = {"num_layers": layers, "hidden_size": WIDTH, "ffn_hidden_size": INNER, "vocab_size": VOCABULARY}
    keys |= {"num_attention_heads": HEADS, "num_kv_heads": HEADS}
    config = load("recipe:llama-tiny", [f"model.{name}={value}" for name, value in keys.items()])
    engine = build.engine(config)
    engine.start()
    try:
        (module,) = initialize_parallel_model(config, engine).local_modules()
    finally:
        engine.shutdown()  # in a single process the model needs none
    return module


def transformers(layers: int) -> nn.Module:
    """Return transformers' model with its attention by ``scaled_dot_product_attention``."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        vocab_size=VOCABULARY,
        num_attention_heads=HEADS,
        use_cache=False,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(sizes)


def torchtitan(layers: int) -> nn.Module:
    """Return torchtitan's model, whose inner width follows from its width."""
    from torchtitan.models.llama3.model.args import TransformerModelArgs
    from torchtitan.models.llama3.model.model import Transformer

    sizes = TransformerModelArgs(
        dim=WIDTH, n_layers=layers, n_heads=HEADS, vocab_size=VOCABULARY, max_seq_len=TOKENS, multiple_of=256
    )
    model: nn.Module = Transformer(sizes)
    with torch.no_grad():
        model.init_weights()
    if model.layers["0"].feed_forward.w1.weight.shape != (INNER, WIDTH):
        raise ValueError("torchtitan's layer has another inner width")
    return model


FRAMEWORKS: dict[str, Callable[[int], nn.Module]] = {
    "nxdt-core": nxdt,
    "transformers": transformers,
    "torchtitan": torchtitan,
}


def logits(model: nn.Module) -> torch.Tensor:
    """Return the logits of random tokens, in float32."""
    found = model(torch.randint(0, VOCABULARY, (ROWS, TOKENS)))
    return (found if isinstance(found, torch.Tensor) else found.logits).float()


def count(model: nn.Module) -> Counts:
    """Count one forward and backward."""
    own = {tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *model.buffers()]}
    saved: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), Operations() as forward:
        found = logits(model)
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in saved}
    with Operations() as backward:
        found.sum().backward()
    held = sum(size for address, size in storages.items() if address not in own)
    return Counts(forward.all, forward.kernels, backward.kernels, held)


def graphs(model: nn.Module) -> tuple[int, int]:
    """Return the graphs and breaks of all layers over some steps."""
    torch._dynamo.reset()
    counters.clear()
    backend = CompileCounter()
    for layer in _layers(model):
        layer.compile(backend=backend)
    for _ in range(STEPS):
        logits(model).sum().backward()
    return backend.frame_count, sum(counters["graph_break"].values())


def _layers(model: nn.Module) -> Iterable[nn.Module]:
    """Return the layers of any of the models: the members of its only list or dictionary of modules."""
    (found,) = (part for part in model.modules() if isinstance(part, (nn.ModuleList, nn.ModuleDict)))
    return found.values() if isinstance(found, nn.ModuleDict) else found


def main() -> int:
    unit = ROWS * TOKENS * WIDTH * 4
    print(f"{'':22}{'operations':>11}{'kernels':>9}{'backward':>10}{'both':>6}{'saved':>7}{'graphs':>8}{'breaks':>8}")
    layers: dict[str, Counts] = {}
    for name, build_model in FRAMEWORKS.items():
        try:
            layer = count(build_model(3)).less(count(build_model(2)))
        except ImportError as error:
            print(f"{name:22}not counted: {error}")
            continue
        layers[name] = layer
        number, breaks = graphs(build_model(3))
        print(
            f"{name + ' ' + version(name):22}{layer.operations:11}{layer.forward:9}{layer.backward:10}"
            f"{layer.forward + layer.backward:6}{layer.saved / unit:7.1f}{number:8}{breaks:8}"
        )
    ours, theirs = layers["nxdt-core"], layers["transformers"]
    return int(ours.forward + ours.backward > theirs.forward + theirs.backward or ours.saved > theirs.saved)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
