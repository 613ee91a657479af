"""Floating-point operations of one training token of a decoder."""

from __future__ import annotations

from typing import Protocol

__all__ = ["DecoderSizes", "decoder_flops_per_token"]


class DecoderSizes(Protocol):
    """The sizes of attention that the dataclass of a decoder's section has."""

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        ...

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        ...

    @property
    def num_attention_heads(self) -> int:
        """Query heads."""
        ...

    @property
    def kv_heads(self) -> int:
        """Key and value heads."""
        ...

    @property
    def head_size(self) -> int:
        """Width of a head."""
        ...


def decoder_flops_per_token(
    sizes: DecoderSizes, sequence_length: int, *, feed_forward: int, vocab_rows: int, window: int | None = None
) -> float:
    """Return the operations of one training token in PaLM's convention (arXiv:2204.02311, appendix B).

    Each weight that a token is multiplied with counts 6, and each layer, query channel and position that a token
    attends to counts 12. Later positions count too, as in the convention; a window bounds their number. The embedding
    is looked up, not multiplied.

    Args:
        sizes: of attention.
        sequence_length: positions per sequence.
        feed_forward: weights of the feed-forward blocks of all layers that a token is multiplied with; of experts,
            those of the experts that it is sent to.
        vocab_rows: rows of the head.
        window: how many tokens each token attends to; None for all.
    """
    query_width, kv_width = sizes.num_attention_heads * sizes.head_size, sizes.kv_heads * sizes.head_size
    attention = sizes.num_layers * sizes.hidden_size * 2 * (query_width + kv_width)
    weights = attention + feed_forward + vocab_rows * sizes.hidden_size
    seen = sequence_length if window is None else min(window, sequence_length)
    return 6.0 * weights + 12.0 * sizes.num_layers * query_width * seen
