"""The component ``gpt``: builds the module, and says how it is sharded, initialised and exchanged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from nxdt_core.errors.models import BadModelConfig
from nxdt_core.models.decoder_builder import decoder_flops_per_token, residual_init_rules
from nxdt_core.models.huggingface import architecture_to_hf, weight_keys
from nxdt_core.models.rope_scaling import scaling_to_hf
from nxdt_core.protocols.model import KeyMap, ModelBuilder
from nxdt_core.protocols.plan import AttentionHeads, InitRule, ParallelPlan, PipelinePlan, TensorStyle
from nxdt_plugin_gpt import hf
from nxdt_plugin_gpt.config import GPTConfig
from nxdt_plugin_gpt.errors import NoHuggingFaceForm
from nxdt_plugin_gpt.modeling import GPT

_LAYER = "layers.*"
_ATTENTION, _MLP = f"{_LAYER}.attention", f"{_LAYER}.mlp"
_RESIDUAL_WRITERS = ("layers.*.attention.o_proj.weight", "layers.*.mlp.down_proj.weight")


class GPTBuilder(ModelBuilder):
    """Builds Megatron's GPT, and its counterparts at Hugging Face."""

    hf_architectures: ClassVar[tuple[str, ...]] = tuple(family.architecture for family in hf.FAMILIES)
    hf_may_lack: ClassVar[tuple[str, ...]] = ("score.weight",)
    hf_ignored: ClassVar[tuple[str, ...]] = hf.IGNORED

    def __init__(self, config: GPTConfig) -> None:
        """Check ``config``.

        Raises:
            BadModelConfig: values that cannot work together.
        """
        problems = [f"{key} {problem}" for key, problem in config.check()]
        if problems:
            raise BadModelConfig(model="gpt", problems=problems)
        self.config = config
        self.vocab_size = config.vocab_rows
        self.max_sequence_length: int | None = config.max_position_embeddings

    def build(self) -> GPT:
        """Return the whole model."""
        return GPT(self.config)

    def plan(self) -> ParallelPlan:
        """Return the plan: tensor parallelism by heads and by feed-forward columns; cuts between any two layers."""
        config, norms = self.config, norms_of(self.config)
        whole_mlp = config.transformer_block_type == "normformer"  # its norm needs every channel
        learned = config.position_embedding_type == "learned_absolute"
        # A fused projection is cut like queries, each of whose heads brings its own key and value.
        query, *key_value = ("qkv_proj",) if config.fused_qkv else ("q_proj", "k_proj", "v_proj")
        mlp_styles: dict[str, TensorStyle] = {f"{_MLP}.up_proj": "column", f"{_MLP}.down_proj": "row"}
        if config.gated:
            mlp_styles[f"{_MLP}.gate_proj"] = "column"
        return ParallelPlan(
            tensor={
                "embedding.tokens": "vocab_embedding",
                **({"embedding.positions": "replicate"} if learned else {}),
                **{f"{_ATTENTION}.{name}": "column" for name in (query, *key_value)},
                f"{_ATTENTION}.o_proj": "row",
                **({} if whole_mlp else mlp_styles),
                config.head_name: "score_head" if config.score_head else "vocab_head",
            },
            tensor_blocks=(
                _ATTENTION,
                *(() if whole_mlp else (_MLP,)),
                *(() if config.score_head else (config.head_name,)),
            ),
            heads=AttentionHeads(
                query_heads=config.num_attention_heads,
                kv_heads=config.kv_heads,
                query=(f"{_ATTENTION}.{query}",),
                key_value=tuple(f"{_ATTENTION}.{name}" for name in key_value),
                output=(f"{_ATTENTION}.o_proj",),
            ),
            pipeline=PipelinePlan(
                hidden_size=config.hidden_size,
                first=("embedding",),
                layers="layers",
                last=(*(() if config.transformer_block_type == "post_ln" else ("norm",)), config.head_name),
            ),
            attention_cores=(f"{_ATTENTION}.core",),
            recompute={
                "CoreAttention": (f"{_ATTENTION}.core",),
                "MLP": (_MLP,),
                "ActivationMultiplyMLP": (f"{_MLP}.activation",),
                "Norm": norms,
                "DecoderLayer": (_LAYER,),
            },
            cheap=(*norms, f"{_MLP}.activation"),
            recompute_layer=_LAYER,
            norms=tuple(f"{norm}.weight" for norm in norms),
            no_weight_decay=("*.bias",),
            tied=(("embedding.tokens.weight", "lm_head.weight"),) if config.tied else (),
            refused=config.rope_scaling.refused(config.max_position_embeddings) if config.rope_scaling else {},
        )

    def init_rules(self) -> Sequence[InitRule]:
        """Return the rules of :func:`nxdt_core.models.decoder_builder.residual_init_rules`; a ``layernorm1p`` starts at
        zero, its difference from one."""
        c = self.config
        return residual_init_rules(
            norms=norms_of(c),
            residual_writers=_RESIDUAL_WRITERS,
            std=c.init_method_std,
            num_layers=c.num_layers,
            scaled=c.use_scaled_init_method,
            norm_weight=0.0 if c.normalization == "layernorm1p" else 1.0,
        )

    def flops_per_token(self, sequence_length: int) -> float:
        """Return the operations of :func:`nxdt_core.models.decoder_builder.decoder_flops_per_token` for this model."""
        c = self.config
        block = (3 if c.gated else 2) * c.hidden_size * c.ffn_size
        rows = 1 if c.score_head else c.vocab_rows
        return decoder_flops_per_token(
            sequence_length,
            layers=c.num_layers,
            hidden_size=c.hidden_size,
            query_width=c.num_attention_heads * c.head_size,
            kv_width=c.kv_heads * c.head_size,
            feed_forward=c.num_layers * block,
            vocab_rows=rows,
        )

    def config_to_hf(self) -> dict[str, Any]:
        """Return the ``config.json``, with keys that both transformers 4 and 5 read. Dropout behind the activation,
        which only training knows, has no place in it, nor have the rows that fill the vocabulary up.

        Raises:
            NoHuggingFaceForm: no family computes what the configuration does.
        """
        config, family = self.config, self._family
        written = {
            **architecture_to_hf(family.architecture, scores=config.score_head),
            "model_type": family.model_type,
            **family.values.write(config),
            family.activation[0]: next(theirs for theirs, ours in hf.ACTIVATIONS.items() if ours == config.activation),
        }
        if family is hf.GPT2:
            dropout = config.hidden_dropout
            return {**written, "embd_pdrop": dropout, "resid_pdrop": dropout, "n_inner": config.ffn_size}
        base, scaled = config.position_freq_base * config.position_abf_factor, scaling_to_hf(config.scaling)
        rope = scaled.pop("rope_scaling") or {"rope_type": "default"}
        return {
            **written,
            "use_parallel_residual": config.transformer_block_type == "gpt_j",
            "attention_bias": True,
            "intermediate_size": config.ffn_size,
            "rotary_pct": config.rotary_percentage,
            "rotary_emb_base": base,
            **scaled,
            "rope_parameters": {**rope, "rope_theta": base, "partial_rotary_factor": config.rotary_percentage},
        }

    def hf_key_map(self) -> Sequence[KeyMap]:
        """Return one entry per parameter, except a tied head. Rows that pad the vocabulary are not exchanged.

        Raises:
            NoHuggingFaceForm: no family has these parameters.
        """
        config, family = self.config, self._family
        entries = [*weight_keys({"score": "score"})] if config.score_head else []
        for entry in weight_keys(family.tables):
            if entry.name == "lm_head.weight" and (config.tied or config.score_head):
                continue
            padded = config.vocab_rows != config.vocab_size and entry.name != "embedding.positions.weight"
            entries.append(replace(entry, transform="pad", sections=(config.vocab_size,)) if padded else entry)
        for ours, (theirs, transform) in family.modules.items():
            by_kind = transform.startswith("interleave")
            sections = (3, config.num_attention_heads) if by_kind else ()
            for leaf, form in (("weight", transform), ("bias", "interleave" if by_kind else "none")):
                name, names = f"{ours}.{leaf}", (f"{theirs}.{leaf}",)
                entries.append(KeyMap(name=name, hf_names=names, transform=form, sections=sections))
        return tuple(entries)

    @property
    def _family(self) -> hf.HFFamily:
        """Return the family that computes what the configuration says."""
        config, obstacles = self.config, dict[str, list[str]]()
        activation, positions = config.activation, config.position_embedding_type
        block, heads = config.transformer_block_type, config.head_size * config.num_attention_heads
        for family in hf.FAMILIES:
            lacking = {
                f"normalization {config.normalization}": config.normalization != "layernorm",
                f"activation {activation}": activation not in hf.ACTIVATIONS.values(),
                "has_bias false": not config.has_bias,
                "fewer key than query heads": not config.fused_qkv,
                "kv_channels other than hidden_size / num_attention_heads": heads != config.hidden_size,
                f"position_embedding_type {positions}": positions != family.positions,
                f"transformer_block_type {block}": block not in family.block_types,
            }
            obstacles[family.architecture] = [what for what, lacks in lacking.items() if lacks]
            if not obstacles[family.architecture]:
                return family
        raise NoHuggingFaceForm(obstacles=obstacles)


def norms_of(config: GPTConfig) -> tuple[str, ...]:
    """Return the patterns of the modules that normalise."""
    more = {"post_ln": (), "normformer": (f"{_LAYER}.attention_output_norm", f"{_MLP}.norm", "norm")}
    return (
        f"{_LAYER}.attention_norm",
        f"{_LAYER}.mlp_norm",
        *more.get(config.transformer_block_type, ("norm",)),
    )
