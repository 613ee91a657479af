"""Base class of the builders of decoders with rotary positions, and what builders of all decoders answer: how the model
is sharded and recomputed, its fresh weights, and the operations of one training token. Imports no torch.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from nxdt_core.config.section import Section, keys_of
from nxdt_core.errors.models import BadModelConfig, NoHFForm
from nxdt_core.models.decoder_config import RotaryDecoderConfig
from nxdt_core.models.huggingface import IGNORED, SCORE, architecture_to_hf, bias_key
from nxdt_core.models.rope_scaling import scaling_to_hf
from nxdt_core.protocols.model import KeyMap, ModelBuilder
from nxdt_core.protocols.plan import AttentionHeads, InitRule, ParallelPlan, PipelinePlan, TensorStyle

if TYPE_CHECKING:
    import torch

LAYER = "layers.*"
"""Pattern of the layers of a :class:`~nxdt_core.models.decoder.RotaryDecoder`."""
ATTENTION = f"{LAYER}.attention"
"""Pattern of their attention."""
MLP = f"{LAYER}.mlp"
"""Pattern of their dense feed-forward blocks."""
NORMS = (f"{LAYER}.attention_norm", f"{LAYER}.mlp_norm", "norm")
"""Patterns of the modules that normalise the residual stream."""
_HEAD_NORMS = (f"{ATTENTION}.q_norm", f"{ATTENTION}.k_norm")

SWIGLU_STYLES: Mapping[str, TensorStyle] = {"gate_proj": "column", "up_proj": "column", "down_proj": "row"}
"""Tensor parallelism within a :class:`~nxdt_core.models.mlp.SwiGLU`."""


Config = TypeVar("Config", bound=RotaryDecoderConfig)


def rotary_decoder_plan(
    config: RotaryDecoderConfig,
    *,
    feed_forward: Mapping[str, Mapping[str, TensorStyle]],
    recompute: Mapping[str, tuple[str, ...]],
) -> ParallelPlan:
    """Return the plan of a decoder: tensor parallelism by heads and by feed-forward columns, pipeline cuts between any
    two layers. A model with further parts changes the result with :func:`dataclasses.replace`.

    Args:
        config: sizes of attention, layers and the vocabulary.
        feed_forward: pattern of feed-forward blocks → the style of each projection in them, such as
            ``{MLP: SWIGLU_STYLES}``. Blocks that do not exist must not be named: a pattern that matches nothing is an
            error.
        recompute: names for ``model.activations_checkpoint_recompute`` besides ``CoreAttention``.
    """
    head_norms = _HEAD_NORMS if config.qk_norm else ()
    projections = {f"{block}.{name}": style for block, styles in feed_forward.items() for name, style in styles.items()}
    return ParallelPlan(
        tensor={
            "embed_tokens": "vocab_embedding",
            f"{ATTENTION}.q_proj": "column",
            f"{ATTENTION}.k_proj": "column",
            f"{ATTENTION}.v_proj": "column",
            f"{ATTENTION}.o_proj": "row",
            **projections,
            config.head_name: "score_head" if config.score_head else "vocab_head",
        },
        tensor_blocks=(ATTENTION, *feed_forward, *(() if config.score_head else (config.head_name,))),
        heads=AttentionHeads(
            query_heads=config.num_attention_heads,
            kv_heads=config.kv_heads,
            query=(f"{ATTENTION}.q_proj",),
            key_value=(f"{ATTENTION}.k_proj", f"{ATTENTION}.v_proj"),
            output=(f"{ATTENTION}.o_proj",),
        ),
        pipeline=PipelinePlan(
            hidden_size=config.hidden_size,
            first=("embed_tokens", *(("embed_noise",) if config.neftune_noise_alpha else ())),
            layers="layers",
            last=("norm", config.head_name),
        ),
        attention_cores=(f"{ATTENTION}.core",),
        recompute={"CoreAttention": (f"{ATTENTION}.core",), **recompute},
        cheap=(
            *NORMS,
            *head_norms,
            *(f"{block}.activation" for block, styles in feed_forward.items() if "gate_proj" in styles),
        ),
        recompute_layer=LAYER,
        norms=tuple(f"{norm}.weight" for norm in (*NORMS, *head_norms)),
        tied=(("embed_tokens.weight", "lm_head.weight"),) if config.tied else (),
        refused=config.rope_scaling.refused(config.max_position_embeddings) if config.rope_scaling else {},
    )


class RotaryDecoderBuilder(ModelBuilder, Generic[Config]):
    """A :class:`~nxdt_core.protocols.model.ModelBuilder` that exchanges with Hugging Face.

    A model implements :meth:`build` and :meth:`plan` and names its architecture::

        class AcmeBuilder(RotaryDecoderBuilder[AcmeConfig]):
            hf_architectures = ("AcmeForCausalLM",)

            def build(self) -> RotaryDecoder:
                return Acme(self.config)

            def plan(self) -> ParallelPlan:
                return rotary_decoder_plan(self.config, feed_forward={MLP: SWIGLU_STYLES}, recompute={"MLP": (MLP,)})
    """

    config: Config
    hf_architectures: ClassVar[tuple[str, ...]]
    """The first is written to ``config.json``."""
    hf_ignored: ClassVar[tuple[str, ...]] = IGNORED
    hf_may_lack: ClassVar[tuple[str, ...]] = (SCORE.hf_names[0],)
    """Tensors that a directory may lack where ``checkpoint.strict`` is false: a language model has no scores."""

    def __init__(self, config: Config) -> None:
        """Check ``config``.

        Raises:
            BadModelConfig: values that cannot work together.
        """
        problems = [f"{key} {problem}" for key, problem in config.check()]
        if problems:
            raise BadModelConfig(model=config.hf_family.values.model, problems=problems)
        self.config = config
        self.vocab_size = config.vocab_size
        self.max_sequence_length: int | None = config.max_position_embeddings

    @property
    def residual_writers(self) -> tuple[str, ...]:
        """Return the patterns of the parameters that write to the residual stream."""
        return f"{ATTENTION}.o_proj.weight", f"{MLP}.down_proj.weight"

    @abstractmethod
    def build(self) -> torch.nn.Module:
        """Build the whole model."""

    @abstractmethod
    def plan(self) -> ParallelPlan:
        """Say how the model may be sharded; see :func:`nxdt_core.models.decoder_builder.rotary_decoder_plan`."""

    def init_rules(self) -> Sequence[InitRule]:
        """Return the rules of :func:`nxdt_core.models.decoder_builder.residual_init_rules` for this model."""
        return residual_init_rules(
            norms=(*NORMS, *_HEAD_NORMS) if self.config.qk_norm else NORMS,
            residual_writers=self.residual_writers,
            std=self.config.init_method_std,
            num_layers=self.config.num_layers,
            scaled=self.config.use_scaled_init_method,
        )

    def feed_forward_weights(self) -> int:
        """Return how many weights of the feed-forward blocks of all layers a token is multiplied with."""
        return self.config.num_layers * 3 * self.config.hidden_size * self.config.ffn_hidden_size

    def flops_per_token(self, sequence_length: int) -> float:
        """Return the operations of :func:`nxdt_core.models.decoder_builder.decoder_flops_per_token` for this model."""
        config = self.config
        return decoder_flops_per_token(
            sequence_length,
            layers=config.num_layers,
            hidden_size=config.hidden_size,
            query_width=config.num_attention_heads * config.head_size,
            kv_width=config.kv_heads * config.head_size,
            feed_forward=self.feed_forward_weights(),
            vocab_rows=1 if config.score_head else config.vocab_size,
            window=config.window,
        )

    def config_to_hf(self) -> dict[str, Any]:
        """Return the ``config.json``, with keys that both transformers 4 and 5 read.

        Raises:
            NoHFForm: a key of the section makes the model compute what the architecture does not.
        """
        family = self.config.hf_family
        handled = {*family.values.names, *family.converted, *family.without_effect}
        handled |= {"rope_theta", "rope_scaling", "score_head"}
        for path, value, default in _values(self.config):
            wanted = True if path in family.always else default
            if not handled & {path, path.partition(".")[0]} and value != wanted:
                raise NoHFForm(key=f"model.{path}", architecture=self.hf_architectures[0], found=value, wanted=wanted)
        return {
            **architecture_to_hf(self.hf_architectures[0], scores=self.config.score_head),
            "model_type": family.values.model,
            **family.values.write(self.config),
            "num_key_value_heads": self.config.kv_heads,
            "head_dim": self.config.head_size,
            "rope_theta": self.config.rope_theta,
            **scaling_to_hf(self.config.rope_scaling),
        }

    def hf_key_map(self) -> Sequence[KeyMap]:
        """Return one entry for each parameter; a tied head has no separate entry."""
        config = self.config
        lacking = {"lm_head.weight"} if config.tied or config.score_head else set()
        if not config.qk_norm:
            lacking |= {f"{norm}.weight" for norm in _HEAD_NORMS}
        biased = {f"{LAYER}.{name}.weight" for name in config.biased}
        weights = [key for key in config.hf_family.keys if key.name not in lacking]
        scores = (SCORE,) if config.score_head else ()
        return (*weights, *(bias_key(key) for key in weights if key.name in biased), *scores)


def _values(section: Section, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield path, value and default of each key of a section and of those in it. The default is that of the class which
    declares the key first, where a model's class may have another one."""
    for name, key in keys_of(type(section)).items():
        value = getattr(section, key.attribute)
        if isinstance(value, Section):
            yield from _values(value, f"{path}{name}.")
            continue
        order = reversed(type(section).__mro__)
        declared = next(cls for cls in order if key.attribute in getattr(cls, "__annotations__", ()))
        yield f"{path}{name}", value, keys_of(declared)[name].default


def residual_init_rules(
    *,
    norms: Sequence[str],
    residual_writers: Sequence[str],
    std: float,
    num_layers: int,
    scaled: bool,
    norm_weight: float = 1.0,
) -> tuple[InitRule, ...]:
    """Return rules that make norms constant, biases zero and matrices normal.

    The matrices that write to the residual stream each add their variance to it. ``scaled`` divides their standard
    deviation by √(2 · ``num_layers``), so that the stream's variance does not depend on the depth (Radford et al. 2019,
    section 2.3).

    Args:
        norms: path patterns of the modules that normalise.
        residual_writers: path patterns of the parameters that write to the residual stream.
        std: standard deviation of the matrices.
        num_layers: layers of the model, each with two blocks that write to the stream.
        scaled: whether the matrices in ``residual_writers`` start narrower.
        norm_weight: scale of the norms at the start.
    """
    residual_std = std / math.sqrt(2 * num_layers) if scaled else std
    return (
        *(InitRule(pattern=f"{norm}.weight", distribution="constant", mean=norm_weight) for norm in norms),
        InitRule(pattern="*.bias", distribution="constant"),
        *(InitRule(pattern=path, distribution="normal", std=residual_std) for path in residual_writers),
        InitRule(pattern="*", distribution="normal", std=std),
    )


def decoder_flops_per_token(
    sequence_length: int,
    *,
    layers: int,
    hidden_size: int,
    query_width: int,
    kv_width: int,
    feed_forward: int,
    vocab_rows: int,
    window: int | None = None,
) -> float:
    """Return the operations of one training token in PaLM's convention (arXiv:2204.02311, appendix B).

    Each weight that a token is multiplied with counts 6, and each layer, query channel and position that a token
    attends to counts 12. Later positions count too, as in the convention; a window bounds their number. The embedding
    is looked up, not multiplied.

    Args:
        sequence_length: positions per sequence.
        layers: decoder layers.
        hidden_size: width of the residual stream.
        query_width: width of the queries of all heads of a layer.
        kv_width: width of the keys of all heads of a layer, which is that of the values.
        feed_forward: weights of the feed-forward blocks of all layers that a token is multiplied with; of experts,
            those of the experts that it is sent to.
        vocab_rows: rows of the head.
        window: how many tokens each token attends to; None for all.
    """
    attention = layers * hidden_size * 2 * (query_width + kv_width)
    weights = attention + feed_forward + vocab_rows * hidden_size
    seen = sequence_length if window is None else min(window, sequence_length)
    return 6.0 * weights + 12.0 * layers * query_width * seen
