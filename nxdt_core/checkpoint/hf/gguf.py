"""A model as one GGUF file, which llama.cpp and Ollama run: Llama, Mistral, Mixtral, Qwen2 and Qwen3.

The file is made of the Hugging Face directory that :func:`nxdt_core.checkpoint.hf.export.plan_hf` plans: its weights
by llama.cpp's names, ``config.json`` as metadata, and the tokenizer. The package ``gguf`` writes it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from nxdt_core.checkpoint.format.shards import TensorSpec
from nxdt_core.checkpoint.hf.export import HFPlan, HFShard
from nxdt_core.checkpoint.hf.source import CONFIG
from nxdt_core.errors.exchange import GgufLibraryMissing, GgufUnsupported
from nxdt_core.models.rope_scaling import RopeScalingConfig
from nxdt_core.models.rotary import frequencies
from nxdt_core.regular_files import replacing

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["GgufDtype", "write_gguf"]

GgufDtype = Literal["float32", "float16", "q8_0"]
"""Of matrices; ``q8_0`` has 8 bits per weight and a scale for each 32. Vectors and routers are float32."""

_FILE_TYPES = {"float32": "ALL_F32", "float16": "MOSTLY_F16", "q8_0": "MOSTLY_Q8_0"}
_MODELS = {"llama": "llama", "mistral": "llama", "mixtral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""``model_type`` → llama.cpp's architecture. That of Llama alone rotates neighbouring channels instead of halves."""
_BLOCK = 32
"""Elements of a row that share a scale of ``q8_0``."""
_EXPERTS = {"w1": "ffn_gate_exps", "w2": "ffn_down_exps", "w3": "ffn_up_exps"}
_ROUTER = "ffn_gate_inp.weight"
_TOKENIZER = "tokenizer.json"
_PRE_TOKENIZERS = (
    (r"\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*", "llama-bpe"),
    (r"\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*", "qwen2"),
    ('"individual_digits": true', "smollm"),
    ('"use_regex": true', "gpt-2"),
)
"""What the pre-tokenizer of a ``tokenizer.json`` contains, and llama.cpp's name for one that splits in the same way."""


@dataclass(frozen=True, slots=True)
class _Tensor:
    """One tensor of the file, and the tensors of the directory that it is made of."""

    name: str
    parts: tuple[str, ...]
    shape: tuple[int, ...]
    heads: int | None
    """Heads whose two halves llama.cpp has in turns; None: rows stay where they are."""

    def of(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return it in float32."""
        parts = [tensors[part].float() for part in self.parts]
        whole = parts[0] if len(self.shape) == parts[0].dim() else torch.stack(parts)
        if self.heads is not None:
            whole = whole.view(self.heads, 2, -1, *whole.shape[1:]).transpose(1, 2).reshape(whole.shape)
        return whole.contiguous()


def write_gguf(
    path: Path, plan: HFPlan, read: Callable[[HFShard], dict[str, torch.Tensor]], *, dtype: GgufDtype, name: str
) -> tuple[int, tuple[str, ...]]:
    """Write the file, one tensor in memory at a time; where it fails, ``path`` is unchanged.

    Args:
        path: of the file.
        plan: of the Hugging Face directory with the same model.
        read: returns the tensors that a part of ``plan`` names.
        dtype: of matrices.
        name: of the model, as programs show it.

    Returns:
        The size of the weights in bytes, and what the file lacks, a sentence each.

    Raises:
        GgufLibraryMissing: the package ``gguf`` is not installed.
        GgufUnsupported: llama.cpp does not run such a model or tokenizer.
        OSError: the file cannot be written.
    """
    try:
        import gguf
        from gguf.gguf_writer import WriterState
    except ImportError as error:
        raise GgufLibraryMissing(reason=str(error)) from error
    config = json.loads(plan.texts[CONFIG])
    _check(config)
    specs = {tensor: spec for shard in plan.shards for tensor, spec in shard.specs.items()}
    sources = {tensor: source for shard in plan.shards for tensor, source in shard.tensors.items()}
    tensors = list(_tensors(specs, config))
    writer = gguf.GGUFWriter(None, _MODELS[config["model_type"]])
    writer.add_name(name)
    notes = [*_add_config(writer, config), *_add_tokenizer(writer, plan.texts, config)]
    kinds = {each.name: _kind(each, dtype) for each in tensors}
    writer.add_file_type(gguf.LlamaFileType[_FILE_TYPES[dtype]])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    factors = _rope_factors(config)
    if factors is not None:
        writer.add_tensor_info("rope_freqs.weight", factors.shape, factors.dtype, factors.nbytes)
    size_bytes = sum(_announce(writer, each, kinds[each.name]) for each in tensors)
    with replacing(path) as file:
        writer.fout, writer.state = [file], WriterState.EMPTY
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        if factors is not None:
            writer.write_tensor_data(factors)
        for each in tensors:
            part = HFShard(
                file="", tensors={p: sources[p] for p in each.parts}, specs={p: specs[p] for p in each.parts}
            )
            kind = gguf.GGMLQuantizationType[kinds[each.name]]
            writer.write_tensor_data(gguf.quants.quantize(each.of(read(part)).numpy(), kind))
        file.flush()
    return size_bytes, tuple(notes)


def _check(config: Mapping[str, Any]) -> None:
    """Raise GgufUnsupported for a model that llama.cpp computes otherwise or not at all."""
    kind, rope = config["model_type"], (config.get("rope_scaling") or {}).get("rope_type", "default")
    if kind not in _MODELS:
        raise GgufUnsupported(reason=f"it is of the type {kind!r}", known=[*_MODELS])
    plain = kind in ("qwen2", "qwen3")
    if rope not in ("default", "linear", *(() if plain else ("llama3",))):
        raise GgufUnsupported(reason=f"its rotary embedding is scaled by {rope!r}", known=[*_MODELS])
    if plain and config.get("attention_bias"):
        raise GgufUnsupported(reason="it is a Qwen3 with attention_bias", known=[*_MODELS])


def _announce(writer: Any, tensor: _Tensor, kind: str) -> int:
    """Write the name, the shape and the dtype of a tensor, and return its size in bytes."""
    import gguf
    import numpy as np

    number = gguf.GGMLQuantizationType[kind]
    block, block_bytes = gguf.GGML_QUANT_SIZES[number]
    size = math.prod(tensor.shape) // block * block_bytes
    plain = {"F32": np.float32, "F16": np.float16}.get(kind)
    shape = tensor.shape if plain is not None else gguf.quant_shape_to_byte_shape(tensor.shape, number)
    writer.add_tensor_info(tensor.name, shape, np.dtype(plain or np.uint8), size, number)
    return int(size)


def _tensors(specs: Mapping[str, TensorSpec], config: Mapping[str, Any]) -> Iterator[_Tensor]:
    """Yield the tensors of the file; those of experts are stacked."""
    import gguf

    architecture = _MODELS[config["model_type"]]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], int(config["num_hidden_layers"]))
    heads = {"q_proj": int(config["num_attention_heads"]), "k_proj": int(config["num_key_value_heads"])}
    if architecture != "llama":
        heads = {}
    experts = range(int(config.get("num_local_experts") or 0))
    for name, spec in specs.items():
        path, _, leaf = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")
        if leaf in _EXPERTS:
            layer, _, number = path.partition(".block_sparse_moe.experts.")
            if number == "0":
                parts = tuple(name.replace(".experts.0.", f".experts.{expert}.") for expert in experts)
                own = f"blk.{layer.rpartition('.')[2]}.{_EXPERTS[leaf]}.weight"
                yield _Tensor(own, parts, (len(parts), *spec.shape), None)
            continue
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if found is None:
            raise GgufUnsupported(reason=f"it has {name!r}", known=[*_MODELS])
        yield _Tensor(found, (name,), spec.shape, heads.get(leaf))


def _kind(tensor: _Tensor, dtype: GgufDtype) -> str:
    """Return llama.cpp's name for the dtype of a tensor."""
    if len(tensor.shape) == 1 or tensor.name.endswith(_ROUTER) or dtype == "float32":
        return "F32"
    return "Q8_0" if dtype == "q8_0" and tensor.shape[-1] % _BLOCK == 0 else "F16"


def _add_config(writer: Any, config: Mapping[str, Any]) -> Iterator[str]:
    head_dim = _head_dim(config)
    writer.add_context_length(int(config["max_position_embeddings"]))
    writer.add_embedding_length(int(config["hidden_size"]))
    writer.add_block_count(int(config["num_hidden_layers"]))
    writer.add_feed_forward_length(int(config["intermediate_size"]))
    writer.add_head_count(int(config["num_attention_heads"]))
    writer.add_head_count_kv(int(config["num_key_value_heads"]))
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(float(config.get("rope_theta") or 10_000.0))
    writer.add_layer_norm_rms_eps(float(config["rms_norm_eps"]))
    writer.add_vocab_size(int(config["vocab_size"]))
    if config.get("num_local_experts"):
        writer.add_expert_count(int(config["num_local_experts"]))
        writer.add_expert_used_count(int(config["num_experts_per_tok"]))
    scaling = config.get("rope_scaling") or {}
    if scaling.get("rope_type") == "linear":
        import gguf

        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(float(scaling["factor"]))
    window = config.get("sliding_window")
    if window and window < config["max_position_embeddings"]:
        yield f"llama.cpp does not know the window of {window:,} tokens: beyond it, the file computes something else"


def _head_dim(config: Mapping[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _rope_factors(config: Mapping[str, Any]) -> NDArray[np.float32] | None:
    """Return by how much Llama 3's scaling lengthens the wave of each pair, [head_dim / 2]; None without it."""
    scaling = config.get("rope_scaling") or {}
    if scaling.get("rope_type") != "llama3":
        return None
    head_dim = _head_dim(config)
    theta = float(config["rope_theta"])
    scaled = frequencies(head_dim, theta, RopeScalingConfig(**scaling))
    found: NDArray[np.float32] = (frequencies(head_dim, theta) / scaled).numpy()
    return found


def _add_tokenizer(writer: Any, texts: Mapping[str, bytes], config: Mapping[str, Any]) -> Iterator[str]:
    """Write the tokenizer of ``tokenizer.json``, with an unused token for each further row of the embedding."""
    import gguf

    if _TOKENIZER not in texts:
        raise GgufUnsupported(reason=f"its tokenizer has no {_TOKENIZER}", known=[*_MODELS])
    content = json.loads(texts[_TOKENIZER])
    model = content["model"]
    if model.get("type") != "BPE":
        raise GgufUnsupported(reason=f"its tokenizer is of the type {model.get('type')!r}", known=[*_MODELS])
    merges = [" ".join(each) if isinstance(each, list) else each for each in model["merges"]]
    added = {each["id"]: each for each in content.get("added_tokens") or ()}
    by_id = {number: token for token, number in model["vocab"].items()} | {
        n: each["content"] for n, each in added.items()
    }
    tokens, types = [], []
    for number in range(int(config["vocab_size"])):
        tokens.append(by_id.get(number, f"[PAD{number}]"))
        types.append(_type(by_id.get(number), added.get(number), gguf.TokenType))
    if model.get("byte_fallback"):  # made of a SentencePiece model, whose scores are the order of its merges
        order = {each.replace(" ", ""): -float(rank) for rank, each in enumerate(merges)}
        writer.add_tokenizer_model("llama")
        writer.add_token_scores([order.get(token, 0.0) for token in tokens])
    else:
        written = json.dumps(content.get("pre_tokenizer"))
        name = next((name for sign, name in _PRE_TOKENIZERS if sign in written), None)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(name or "default")
        writer.add_token_merges(merges)
        if name is None:
            yield "llama.cpp has no name for this pre-tokenizer, and may split texts in another way"
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    for key in ("bos", "eos", "pad"):
        found = config.get(f"{key}_token_id")
        found = found[0] if isinstance(found, list) else found
        if found is not None:
            getattr(writer, f"add_{key}_token_id")(found)
    post = json.dumps(content.get("post_processor"))
    writer.add_add_bos_token(config.get("bos_token_id") is not None and by_id.get(config["bos_token_id"], "\0") in post)
    template = texts.get("chat_template.jinja")
    if template is not None:
        writer.add_chat_template(template.decode())


def _type(token: str | None, added: Mapping[str, Any] | None, types: Any) -> Any:
    if token is None:
        return types.UNUSED
    if added is not None:
        return types.CONTROL if added.get("special") else types.USER_DEFINED
    return types.BYTE if len(token) == 6 and token.startswith("<0x") and token.endswith(">") else types.NORMAL
