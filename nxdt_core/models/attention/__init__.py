"""Attention and its masks, for plain and for packed batches."""

from nxdt_core.models.attention.grouped_query import AttentionSemantics, CausalAttention, GroupedQueryAttention

__all__ = ["AttentionSemantics", "CausalAttention", "GroupedQueryAttention"]
