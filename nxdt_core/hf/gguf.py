"""A model as one GGUF file, which llama.cpp and Ollama run: Llama, Mistral, Mixtral, Qwen2 and Qwen3.

The file is made of the Hugging Face directory that :func:`nxdt_core.hf.directory.plan_hf` plans: its weights
by llama.cpp's names, ``config.json`` as metadata, and the tokenizer. The package ``gguf`` writes it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from nxdt_core.checkpoint.format.hf_source import CONFIG, GENERATION_CONFIG, HFSource
from nxdt_core.checkpoint.format.shards import TensorSpec
from nxdt_core.errors.base import listing
from nxdt_core.errors.checkpoints import GgufLibraryMissing, GgufUnsupported
from nxdt_core.hf.directory import HFPlan, HFShard
from nxdt_core.models.rope_scaling import RopeScalingConfig
from nxdt_core.models.rotary import frequencies
from nxdt_core.system.regular_files import replacing

GgufDtype = Literal["float32", "float16", "q8_0"]
"""Dtype of matrices; ``q8_0`` has 8 bits per weight and a scale for each 32. Vectors and routers are float32."""

_FILE_TYPES = {"float32": "ALL_F32", "float16": "MOSTLY_F16", "q8_0": "MOSTLY_Q8_0"}
_MODELS = {"llama": "llama", "mistral": "llama", "mixtral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""``model_type`` → llama.cpp's architecture. That of Llama alone rotates neighbouring channels instead of halves."""
_SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "head_count": "num_attention_heads",
    "head_count_kv": "num_key_value_heads",
}
"""The writer's method for a size → its key in ``config.json``."""
_BLOCK = 32
"""Elements of a row that share a scale of ``q8_0``."""
_EXPERTS = {"w1": "ffn_gate_exps", "w2": "ffn_down_exps", "w3": "ffn_up_exps"}
_ROUTER = "ffn_gate_inp.weight"
_TOKENIZER = "tokenizer.json"
_BYTES = {f"<0x{byte:02X}>" for byte in range(256)}
"""Tokens of single bytes in a SentencePiece model."""
_LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PRE_TOKENIZERS: Mapping[tuple[bool | str | None, ...], str] = {
    (True, _LLAMA_3, "bytes"): "llama-bpe",
    (False, _LLAMA_3, "bytes"): "dbrx",
    (False, _LLAMA_3.replace("{1,3}", ""), "bytes"): "qwen2",
    (True, _TEKKEN, "bytes"): "tekken",
    (False, "digits", "words"): "smollm",
    (False, "words"): "gpt-2",
}
"""llama.cpp's names of pre-tokenizers, by ``ignore_merges`` of the BPE model and by how each part splits."""


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
    model_type, scaling = config["model_type"], config.get("rope_scaling") or {}
    rope, is_qwen = scaling.get("rope_type", "default"), model_type in ("qwen2", "qwen3")
    if model_type not in _MODELS:
        raise GgufUnsupported(reason=f"it is of the type {model_type!r}", known=[*_MODELS])
    if rope not in ("default", "linear", *(() if is_qwen else ("llama3",))):
        raise GgufUnsupported(reason=f"its rotary embedding is scaled by {rope!r}", known=[*_MODELS])
    if is_qwen and config.get("attention_bias"):
        raise GgufUnsupported(reason="it is a Qwen3 with attention_bias", known=[*_MODELS])
    specs = {tensor: spec for shard in plan.shards for tensor, spec in shard.specs.items()}
    sources = {tensor: source for shard in plan.shards for tensor, source in shard.tensors.items()}
    tensors = list(_tensors(specs, config))
    writer = gguf.GGUFWriter(None, _MODELS[model_type])
    writer.add_name(name)
    notes = [*_add_config(writer, config), *_add_tokenizer(writer, plan.texts, config)]
    writer.add_file_type(gguf.LlamaFileType[_FILE_TYPES[dtype]])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    factors: NDArray[np.float32] | None = None
    if rope == "llama3":  # by how much it lengthens the wave of each pair, [head_dim / 2]
        head_dim = int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
        theta = float(config["rope_theta"])
        scaled = frequencies(head_dim, theta, RopeScalingConfig(**scaling))
        factors = (frequencies(head_dim, theta) / scaled).numpy()
        writer.add_tensor_info("rope_freqs.weight", factors.shape, factors.dtype, factors.nbytes)
    kinds, size_bytes = {}, 0
    for item in tensors:
        if len(item.shape) == 1 or item.name.endswith(_ROUTER) or dtype == "float32":
            kind = "F32"
        else:
            kind = "Q8_0" if dtype == "q8_0" and item.shape[-1] % _BLOCK == 0 else "F16"
        kinds[item.name] = number = gguf.GGMLQuantizationType[kind]
        block, block_bytes = gguf.GGML_QUANT_SIZES[number]
        item_bytes = math.prod(item.shape) // block * block_bytes
        plain = {"F32": np.float32, "F16": np.float16}.get(kind)
        shape = item.shape if plain is not None else gguf.quant_shape_to_byte_shape(item.shape, number)
        writer.add_tensor_info(item.name, shape, np.dtype(plain or np.uint8), item_bytes, number)
        size_bytes += int(item_bytes)
    with replacing(path) as file:
        writer.fout, writer.state = [file], WriterState.EMPTY
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        if factors is not None:
            writer.write_tensor_data(factors)
        for item in tensors:
            part = HFShard(
                file="", tensors={p: sources[p] for p in item.parts}, specs={p: specs[p] for p in item.parts}
            )
            writer.write_tensor_data(gguf.quants.quantize(item.of(read(part)).numpy(), kinds[item.name]))
        file.flush()
    return size_bytes, tuple(notes)


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
                experts_name = f"blk.{layer.rpartition('.')[2]}.{_EXPERTS[leaf]}.weight"
                yield _Tensor(experts_name, parts, (len(parts), *spec.shape), None)
            continue
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if gguf_name is None:
            raise GgufUnsupported(reason=f"it has {name!r}", known=[*_MODELS])
        yield _Tensor(gguf_name, (name,), spec.shape, heads.get(leaf))


def _add_config(writer: Any, config: Mapping[str, Any]) -> Iterator[str]:
    head_dim = int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
    for key, name in _SIZES.items():
        getattr(writer, f"add_{key}")(int(config[name]))
    for key in ("key_length", "value_length", "rope_dimension_count"):
        getattr(writer, f"add_{key}")(head_dim)
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


def _add_tokenizer(writer: Any, texts: Mapping[str, bytes], config: Mapping[str, Any]) -> Iterator[str]:
    """Write the tokenizer of ``tokenizer.json``, with an unused token for each further row of the embedding.

    Yields:
        Where llama.cpp gives texts other tokens or ends them at others, a sentence each.
    """
    import gguf
    import tokenizers

    if _TOKENIZER not in texts:
        raise GgufUnsupported(reason=f"its tokenizer has no {_TOKENIZER}", known=[*_MODELS])
    tokenizer = tokenizers.Tokenizer.from_buffer(texts[_TOKENIZER])
    tokenizer.no_truncation()
    tokenizer.no_padding()
    content = json.loads(tokenizer.to_str())  # with the defaults that the file leaves out
    model, added = content["model"], {item["id"]: item for item in content["added_tokens"]}
    if model["type"] != "BPE":
        raise GgufUnsupported(reason=f"its tokenizer is of the type {model['type']!r}", known=[*_MODELS])
    normalizers, splits = _steps(content["normalizer"]), _steps(content["pre_tokenizer"])
    byte_level = any(item["type"] == "ByteLevel" for item in splits)
    if not byte_level and not (model["byte_fallback"] and model["vocab"].keys() >= _BYTES):
        raise GgufUnsupported(reason="its BPE tokenizer lacks tokens for single bytes", known=[*_MODELS])
    by_id = {number: token for token, number in model["vocab"].items()}
    by_id |= {number: item["content"] for number, item in added.items()}
    tokens, types = [], []
    for number in range(int(config["vocab_size"])):
        token = by_id.get(number)
        tokens.append(f"[PAD{number}]" if token is None else token)
        if token is None:
            types.append(gguf.TokenType.UNUSED)
        elif number in added:
            types.append(gguf.TokenType.CONTROL if added[number]["special"] else gguf.TokenType.USER_DEFINED)
        else:
            types.append(gguf.TokenType.BYTE if not byte_level and token in _BYTES else gguf.TokenType.NORMAL)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if byte_level:
        name = _PRE_TOKENIZERS.get((model["ignore_merges"], *map(_split, splits)))
        unlike = [*normalizers, *(splits if name is None else ())]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(name or "default")
        writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    else:  # llama.cpp has these as SentencePiece models, whose scores are the order of the merges
        order = {"".join(pair): -float(rank) for rank, pair in enumerate(model["merges"])}
        unlike = [item for item in (*normalizers, *splits) if item["type"] not in ("Prepend", "Replace", "Metaspace")]
        marking = [item for item in splits if item["type"] == "Metaspace" and item["prepend_scheme"] != "never"]
        writer.add_tokenizer_model("llama")
        writer.add_token_scores([order.get(token, 0.0) for token in tokens])
        writer.add_add_space_prefix(bool(marking) or any(item["type"] == "Prepend" for item in normalizers))
        if marking:
            yield "llama.cpp puts a space before texts that begin with one, and after each special token"
    if unlike:
        kinds = listing([item["type"] for item in unlike])
        yield f"llama.cpp has no counterpart of this tokenizer's {kinds}, and may split texts in another way"
    trimmed = [
        item["content"]
        for item in added.values()
        if item["lstrip"] or item["rstrip"] or item["single_word"] or (item["normalized"] and normalizers)
    ]
    if trimmed:
        yield f"llama.cpp does not apply the rules for spaces and normalization of these tokens: {listing(trimmed)}"
    text = tokenizer.encode("a")
    places = [place for place, special in enumerate(text.special_tokens_mask) if not special] or [len(text.ids)]
    before, after = text.ids[: places[0]], text.ids[places[-1] + 1 :]
    generation = json.loads(texts.get(GENERATION_CONFIG, b"{}"))
    named = json.loads(texts.get("tokenizer_config.json", b"{}")).get("eos_token")
    stops = HFSource(path="", config=config, generation=generation).stop_ids
    ends = sorted(stops, key=lambda number: by_id.get(number) != named)
    ids = {key: config.get(f"{key}_token_id") for key in ("bos", "pad")}
    ids |= {"unk": model["vocab"].get(model["unk_token"]), **dict(zip(("eos", "eot", "eom"), ends, strict=False))}
    if len(before) == 1:
        ids["bos"] = before[0]
    for key, special in ids.items():
        if special is not None:
            getattr(writer, f"add_{key}_token_id")(special)
    writer.add_add_bos_token(len(before) == 1)
    writer.add_add_eos_token(bool(after) and after == ends[:1])
    if len(before) > 1 or (after and after != ends[:1]):
        around = [by_id[number] for number in (*before, *after)]
        yield f"llama.cpp does not put all of the tokens around texts that this tokenizer puts there: {listing(around)}"
    if not ends:
        default = 11 if byte_level else 2
        yield f"the run has no end token, and llama.cpp ends texts at its default: {default}, {tokens[default]!r}"
    if len(ends) > 3:
        more = listing([by_id[number] for number in ends[3:]])
        yield f"llama.cpp ends texts at three tokens at most, and not at {more}"
    if generation.get("suppress_tokens"):
        writer.add_array("tokenizer.ggml.suppress_tokens", generation["suppress_tokens"])
    template = texts.get("chat_template.jinja")
    if template is not None:
        writer.add_chat_template(template.decode())


def _steps(part: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """Return the normalizers or pre-tokenizers of a ``tokenizer.json``, in order."""
    if part is None:
        return []
    parts = part.get("pretokenizers", part.get("normalizers")) if part["type"] == "Sequence" else None
    return [part] if parts is None else [step for inner in parts for step in _steps(inner)]


def _split(step: Mapping[str, Any]) -> str | None:
    """Return how a pre-tokenizer splits: ``bytes``, ``words``, ``digits`` or a regular expression; None: otherwise."""
    if step["type"] == "ByteLevel" and not step["add_prefix_space"]:
        return "words" if step["use_regex"] else "bytes"
    if step["type"] == "Digits" and step["individual_digits"]:
        return "digits"
    plain = step["type"] == "Split" and step["behavior"] == "Isolated" and not step["invert"]
    return step["pattern"].get("Regex") if plain else None
