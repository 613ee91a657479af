"""Parts of decoder models: modules, configuration, parallel plan, initial weights, FLOPs and Hugging Face conversion.

Configurations and builders import no torch, so that the dataclass of a model's section can inherit from one.
"""
