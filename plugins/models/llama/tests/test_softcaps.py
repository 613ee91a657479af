"""Caps of attention scores and logits, and the scale of attention: the same numbers as transformers' Gemma 2.

Its other parts (norms behind the blocks, GELU, embeddings with a factor) are here, as in a plugin of another author.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
import torch
from nxdt_testing.errors import raises
from nxdt_testing.runs.run import built
from torch import nn
from torch.nn import functional

from nxdt_core.errors.models import BadModelConfig
from nxdt_core.models.attention.documents import DocumentMasks
from nxdt_core.models.decoder import RotaryDecoder, RotaryDecoderLayer
from nxdt_core.models.decoder_builder import MLP, SWIGLU_STYLES, RotaryDecoderBuilder, rotary_decoder_plan
from nxdt_core.models.decoder_config import RotaryDecoderConfig
from nxdt_core.models.huggingface import (
    DECODER_MODULES,
    OPTIONAL,
    REQUIRED,
    SWIGLU_MODULES,
    HFFamily,
    HFValues,
    weight_keys,
)
from nxdt_core.models.mlp import SwiGLU
from nxdt_core.models.norm import RMSNorm

transformers = pytest.importorskip("transformers", reason="transformers is not installed: nothing to compare with")

CAPS = {
    "attention_softcap": ("attn_logit_softcapping", 50.0),
    "logits_softcap": ("final_logit_softcapping", 30.0),
}
GEMMA = HFFamily(
    values=HFValues(model="gemma2", required=REQUIRED, optional={**OPTIONAL, **CAPS}),
    keys=weight_keys({**DECODER_MODULES, **SWIGLU_MODULES}),
    converted=("attention_scale",),
)


class GemmaConfig(RotaryDecoderConfig):
    hf_family: ClassVar[HFFamily] = GEMMA

    @property
    def window(self) -> int:
        return 5

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> dict[str, Any]:
        return {**super().from_hf(hf), "attention_scale": hf.get("query_pre_attn_scalar", 256) ** -0.5}


class GatedGELU(nn.Module):
    def forward(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return functional.gelu(gate, approximate="tanh") * up


class GemmaLayer(RotaryDecoderLayer):
    def __init__(self, config: GemmaConfig, masks: DocumentMasks) -> None:
        super().__init__(config, masks, SwiGLU(config.hidden_size, config.ffn_hidden_size))
        self.mlp.activation = GatedGELU()
        self.attended_norm, self.transformed_norm = (
            RMSNorm(config.hidden_size, config.layernorm_epsilon) for _ in range(2)
        )

    def forward(self, hidden, rotary, document_ids=None, step=None):
        attended = self.attention(self.attention_norm(hidden), rotary, document_ids, step)
        hidden = hidden + self.attended_norm(attended)
        return hidden + self.transformed_norm(self.mlp(self.mlp_norm(hidden)))


class GemmaBuilder(RotaryDecoderBuilder[GemmaConfig]):
    hf_architectures: ClassVar[tuple[str, ...]] = ("Gemma2ForCausalLM",)

    def build(self) -> RotaryDecoder:
        masks = DocumentMasks()
        return RotaryDecoder(self.config, (GemmaLayer(self.config, masks) for _ in range(self.config.num_layers)))

    def plan(self):
        return rotary_decoder_plan(self.config, feed_forward={MLP: SWIGLU_STYLES}, recompute={"MLP": (MLP,)})

    def config_to_hf(self) -> dict[str, Any]:
        assert self.config.attention_scale is not None
        return {**super().config_to_hf(), "query_pre_attn_scalar": self.config.attention_scale**-2}


SIZES = {"vocab_size": 60, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}


@pytest.fixture(scope="module")
def theirs():
    torch.manual_seed(1)
    config = transformers.Gemma2Config(
        **SIZES,
        intermediate_size=48,
        num_hidden_layers=2,
        layer_types=["sliding_attention"] * 2,
        sliding_window=5,
        query_pre_attn_scalar=3,
        attn_logit_softcapping=0.5,
        final_logit_softcapping=0.7,
        initializer_range=0.3,
        pad_token_id=None,  # whose row would take no gradient as an input
        attn_implementation="eager",
    )
    return transformers.Gemma2ForCausalLM(config).double().eval()


NORMS = {
    "attention_norm": "input_layernorm",
    "attended_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "transformed_norm": "post_feedforward_layernorm",
}


def their_name(name: str) -> str:
    for ours, other in NORMS.items():
        name = name.replace(f".{ours}.", f".{other}.")
    name = name.replace(".attention.", ".self_attn.")
    return "model.embed_tokens.weight" if name == "lm_head.weight" else f"model.{name}"


def test_logits_and_gradients_are_those_of_gemma_2(theirs):
    config = GemmaConfig.model_validate(GemmaConfig.from_hf({**theirs.config.to_dict(), "tie_word_embeddings": False}))
    assert (config.attention_softcap, config.logits_softcap, config.attention_scale) == (0.5, 0.7, 3**-0.5)
    ours, factor = built(GemmaBuilder(config)).double(), float(theirs.model.embed_tokens.embed_scale)
    given = dict(theirs.named_parameters())
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            value = given[their_name(name)]
            parameter.copy_(value * factor if name == "embed_tokens.weight" else value + ("norm" in name))
    ids = torch.randint(60, (2, 14), generator=torch.Generator().manual_seed(2))
    logits, expected = ours(ids), theirs(ids).logits
    assert expected.abs().max() > 0.5  # near the cap
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-6)
    for each in (logits, expected):
        functional.cross_entropy(each[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    gradients = {name: parameter.grad for name, parameter in ours.named_parameters()}
    gradients["lm_head.weight"] = gradients["lm_head.weight"] + factor * gradients.pop("embed_tokens.weight")
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, given[their_name(name)].grad, rtol=1e-4, atol=1e-6, msg=name)


def test_a_family_that_has_the_keys_exports_them(theirs):
    read = GemmaConfig.from_hf(theirs.config.to_dict())
    written = GemmaBuilder(GemmaConfig.model_validate(read)).config_to_hf()
    assert (written["attn_logit_softcapping"], written["final_logit_softcapping"]) == (0.5, 0.7)
    assert math.isclose(written["query_pre_attn_scalar"], 3)
    assert GemmaConfig.from_hf(written) == pytest.approx(read)


@pytest.mark.parametrize("key", ["attention_scale", "attention_softcap", "logits_softcap"])
def test_a_cap_or_a_scale_is_above_zero(theirs, key):
    config = GemmaConfig.model_validate(GemmaConfig.from_hf(theirs.config.to_dict()))
    with raises(BadModelConfig, match=f"{key} must be above 0"):
        GemmaBuilder(config.model_copy(update={key: 0.0}))
