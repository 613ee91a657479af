"""Building blocks for parallel engines: what a plan asks of a plain model, before any process group is involved."""
