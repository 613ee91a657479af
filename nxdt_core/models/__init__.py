"""What decoder models share besides their modules: configuration, plan, fresh weights, FLOPs, Hugging Face exchange.

Nothing here imports torch, so that the dataclass of a model's section can inherit from it. The modules are in
:mod:`nxdt_core.models`.
"""
