"""The section of the decoder with ALiBi."""

from nxdt_core.config.section import Section


class AlibiConfig(Section):
    """Keys next to ``model.name: acme-alibi``."""

    vocab_size: int = 512
    """Rows of the embedding."""
    num_layers: int = 4
    """Number of layers."""
    hidden_size: int = 64
    """Width of the hidden states."""
    num_attention_heads: int = 4
    """Number of heads, a power of two."""
