"""``torch.compile``: layers, one by one, and the cache of their graphs."""
