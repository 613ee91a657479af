"""A decoder with rotary positions whose feed-forward blocks are a squared ReLU (So et al. 2021, arXiv:2109.08668)."""

from typing import ClassVar

import torch

from acme_nxdt.decoder_config import DecoderConfig
from nxdt_core.models.attention.documents import DocumentMasks
from nxdt_core.models.decoder import RotaryDecoder, RotaryDecoderLayer
from nxdt_core.models.decoder_builder import LAYER, MLP, NORMS, RotaryDecoderBuilder, rotary_decoder_plan
from nxdt_core.protocols.plan import ParallelPlan


class SquaredReLU(torch.nn.Module):
    """``down(relu(up(x))²)``."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.up_proj = torch.nn.Linear(config.hidden_size, config.ffn_hidden_size, bias=False)
        self.down_proj = torch.nn.Linear(config.ffn_hidden_size, config.hidden_size, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``hidden`` [batch, seq, hidden] to the same shape."""
        return self.down_proj(self.up_proj(hidden).relu().square())


class DecoderBuilder(RotaryDecoderBuilder[DecoderConfig]):
    """Fresh weights, checks and the exchange with Hugging Face are inherited."""

    hf_architectures: ClassVar[tuple[str, ...]] = ("AcmeForCausalLM",)

    def build(self) -> torch.nn.Module:
        """Return the module; called on the meta device."""
        masks = DocumentMasks()
        blocks = (SquaredReLU(self.config) for _ in range(self.config.num_layers))
        return RotaryDecoder(self.config, (RotaryDecoderLayer(self.config, masks, block) for block in blocks))

    def plan(self) -> ParallelPlan:
        """Attention is planned already; here is how the feed-forward block is cut."""
        return rotary_decoder_plan(
            self.config,
            feed_forward={MLP: {"up_proj": "column", "down_proj": "row"}},
            recompute={"MLP": (MLP,), "Norm": NORMS, "DecoderLayer": (LAYER,)},
        )

    def feed_forward_weights(self) -> int:
        """Two matrices per layer, where the default counts the three of SwiGLU."""
        return self.config.num_layers * 2 * self.config.hidden_size * self.config.ffn_hidden_size
