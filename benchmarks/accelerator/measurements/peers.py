"""The same shapes in other libraries: their model in a bare loop with torch's fused AdamW, layers and loss compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional

from accelerator.bench import GIB, Bench
from accelerator.runs import SHAPES, Shape, length
from nxdt_core.distributed.devices import peak_flops, profile_of
from nxdt_core.run.callbacks.metrics import TokenFlops, token_flops

__all__ = ["PEERS", "pretrain"]

Logits = Callable[[torch.Tensor], torch.Tensor]


def pretrain(bench: Bench, shape: str, names: Sequence[str] = ("torchtitan", "litgpt", "transformers")) -> None:
    """Measure the peers of these names one after the other; one that is not installed has a row that says so."""
    sequence, sized = length(bench), SHAPES[shape].sized(bench)
    for name in names:
        with bench.part(f"{name} {shape}"):
            try:
                model, logits, layers = PEERS[name](sized, sequence, bench.device)
            except ImportError as error:
                bench.row(f"{name} {shape}", outcome=f"not importable: {error}"[:200])
                continue
            _measure(
                bench, f"{name} {shape}", sized, sequence, model, _step(bench, sized, sequence, model, logits, layers)
            )
            del model, logits, layers


def _torchtitan(shape: Shape, sequence: int, device: torch.device) -> Any:
    from torchtitan.models.llama3 import Transformer, TransformerModelArgs

    arguments = TransformerModelArgs(
        dim=shape.hidden,
        n_layers=shape.layers,
        n_heads=shape.heads,
        n_kv_heads=shape.kv_heads,
        vocab_size=shape.vocabulary,
        multiple_of=shape.ffn,  # two thirds of four times the width, rounded up to this
        rope_theta=500000,
        max_seq_len=sequence,
    )
    with device:
        model = Transformer(arguments)
    return model, model, list(model.layers.values())


def _transformers(shape: Shape, sequence: int, device: torch.device) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=shape.layers,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        vocab_size=shape.vocabulary,
        max_position_embeddings=sequence,
        tie_word_embeddings=False,
        use_cache=False,
        attn_implementation="sdpa",
    )
    with device:
        model = LlamaForCausalLM(config)
    return model, lambda ids: model(ids).logits, model.model.layers


def _litgpt(shape: Shape, sequence: int, device: torch.device) -> Any:
    from litgpt.config import Config
    from litgpt.model import GPT

    config = Config(
        block_size=sequence,
        n_layer=shape.layers,
        n_embd=shape.hidden,
        n_head=shape.heads,
        n_query_groups=shape.kv_heads,
        intermediate_size=shape.ffn,
        padded_vocab_size=shape.vocabulary,
        rotary_percentage=1.0,
        rope_base=500000,
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMLP",
    )
    with device:
        model = GPT(config)
    return model, model, model.transformer.h


PEERS: dict[str, Callable[[Shape, int, torch.device], Any]] = {
    "torchtitan": _torchtitan,
    "litgpt": _litgpt,
    "transformers": _transformers,
}
"""Each returns the model, what makes logits of ids, and the layers to compile."""


def _step(
    bench: Bench, shape: Shape, sequence: int, model: torch.nn.Module, logits: Logits, layers: Any
) -> Callable[[], torch.Tensor]:
    """Forward, loss, backward, clipping, AdamW; float32 weights under autocast, or all in bfloat16."""
    whole = shape.precision["type"] == "bf16SR"
    if whole:
        model.bfloat16()
    model.train()
    loss_of = _loss
    if bench.compiles:
        torch._dynamo.config.recompile_limit = 2 * len(layers)  # else layers that differ by their number stay eager
        for layer in layers:
            layer.compile()
        loss_of = torch.compile(_loss)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    device = bench.device
    ids = torch.randint(shape.vocabulary, (shape.micro_batch, sequence + 1), device=device)
    tokens, labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def step() -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=not whole):
            found = logits(tokens)
        loss = loss_of(found, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def _loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def _measure(
    bench: Bench, what: str, shape: Shape, sequence: int, model: torch.nn.Module, step: Callable[[], torch.Tensor]
) -> None:
    """Measure, and raise an error where the model is not that of the shape or does not learn its one batch."""
    parameters, expected = sum(parameter.numel() for parameter in model.parameters()), shape.parameters
    if parameters != expected:
        raise ValueError(f"it has {parameters:,} parameters, the shape {expected:,}")
    profile_of(bench.device).operations.reset_max_memory(bench.device)
    first = float(step())
    seconds = bench.seconds(step, 2 if bench.small else 10, warm_up=1 if bench.small else 4)
    last = float(step())
    if not last < first:
        raise ValueError(f"its loss went from {first:.3f} to {last:.3f}")
    rate = shape.micro_batch * sequence / seconds
    flops, peak = _flops(bench, shape, sequence), peak_flops(bench.device, "bfloat16")
    bench.row(
        what,
        tokens_per_s=rate,
        mfu=None if peak is None else flops.strict * rate / peak,
        mfu_palm=None if peak is None else flops.palm * rate / peak,
        step_ms=1000 * seconds,
        peak_gib=profile_of(bench.device).operations.max_memory_bytes(bench.device) / GIB,
        losses=f"{first:.3f}, {last:.3f}",
        precision="bfloat16" if shape.precision["type"] == "bf16SR" else "autocast",
    )


def _flops(bench: Bench, shape: Shape, sequence: int) -> TokenFlops:
    from nxdt_plugin_llama.builder import LlamaBuilder
    from nxdt_plugin_llama.config import LlamaConfig

    keys = {
        key: value for key, value in shape.model(bench, sequence).items() if key not in ("name", "compile", "optim")
    }
    return token_flops(LlamaBuilder(LlamaConfig(**keys)), sequence)
