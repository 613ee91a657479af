"""Section ``model`` of the decoder, and the model of Hugging Face that it corresponds to. No torch here."""

from typing import ClassVar

from nxdt_core.models.decoder_config import RotaryDecoderConfig
from nxdt_core.models.huggingface import DECODER_MODULES, OPTIONAL, REQUIRED, HFFamily, HFValues, weight_keys

ACME = HFFamily(
    values=HFValues(model="acme", required=REQUIRED, optional=OPTIONAL, only={"hidden_act": ("relu2",)}),
    keys=weight_keys(
        {
            **DECODER_MODULES,
            "layers.*.mlp.up_proj": "model.layers.*.mlp.up_proj",
            "layers.*.mlp.down_proj": "model.layers.*.mlp.down_proj",
        }
    ),
)


class DecoderConfig(RotaryDecoderConfig):
    """Keys in addition to ``model.name: acme-decoder``; the others are inherited."""

    hf_family: ClassVar[HFFamily] = ACME

    rope_theta: float = 500_000.0
    """Base of the rotary frequencies."""
