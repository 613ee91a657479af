"""Attention over part of the keys: kernels that give the log-sum-exp of their scores, and blocks that are merged by it.

Attention over parts is exact once the parts are merged by log-sum-exp, and backward over a part is exact when it is
given the output and the log-sum-exp over all keys (Dao et al. 2022, arXiv:2205.14135).
``F.scaled_dot_product_attention`` hides both, so these files call torch's kernels below it.
"""
