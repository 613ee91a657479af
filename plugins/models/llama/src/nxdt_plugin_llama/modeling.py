"""The module: a rotary decoder with dense feed-forward blocks. Plain torch, nothing parallel."""

from __future__ import annotations

from nxdt_core.models.attention.documents import DocumentMasks
from nxdt_core.models.decoder import RotaryDecoder, RotaryDecoderLayer
from nxdt_core.models.mlp import SwiGLU
from nxdt_plugin_llama.config import LlamaConfig


class Llama(RotaryDecoder):
    """Touvron et al. 2023 (arXiv:2302.13971) with the changes of Llama 2 and 3 (arXiv:2407.21783); with a window, the
    model of Jiang et al. 2023 (arXiv:2310.06825)."""

    def __init__(self, config: LlamaConfig) -> None:
        masks = DocumentMasks()
        blocks = (
            SwiGLU(config.hidden_size, config.ffn_hidden_size, bias=config.mlp_bias) for _ in range(config.num_layers)
        )
        super().__init__(config, (RotaryDecoderLayer(config, masks, block) for block in blocks))
