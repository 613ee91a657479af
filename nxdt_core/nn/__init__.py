"""Building blocks of models in plain ``torch.nn``: no process group, no mesh, no sharding.

An engine shards a model that is made of them by its :class:`~nxdt_core.protocols.plan.ParallelPlan` and may replace
the attention core (:mod:`nxdt_core.nn.attention`) and the loss over the vocabulary (:mod:`nxdt_core.nn.loss`).
"""
