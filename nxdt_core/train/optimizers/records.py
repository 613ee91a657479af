"""The optimizers as components. No torch here."""

from __future__ import annotations

from nxdt_core.api import Component

__all__ = ["OPTIMIZERS"]

_HERE = "nxdt_core.train.optimizers"


def _optimizer(name: str, target: str, config: str, summary: str) -> Component:
    return Component(
        name=name,
        target=f"{_HERE}.{target}",
        config=f"{_HERE}.config:{config}",
        summary=summary,
        capabilities=frozenset({"sharded"}),
    )


OPTIMIZERS = (
    _optimizer(
        "adamw",
        "stock:adamw",
        "AdamWConfig",
        "AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101), torch's fused or foreach kernels",
    ),
    _optimizer(
        "adamw_fp32OptState",
        "float32_state:adamw_fp32_state",
        "AdamWConfig",
        "AdamW with float32 state over parameters of any dtype",
    ),
    _optimizer("adam", "stock:adam", "AdamConfig", "Adam (Kingma & Ba 2015, arXiv:1412.6980), torch's"),
    _optimizer("sgd", "stock:sgd", "SGDConfig", "gradient descent with momentum, torch's"),
    _optimizer(
        "adafactor",
        "adafactor:Adafactor",
        "AdafactorConfig",
        "Adafactor (Shazeer & Stern 2018, arXiv:1804.04235), factored over whole matrices in any layout",
    ),
    _optimizer("lion", "lion:Lion", "LionConfig", "Lion (Chen et al. 2023, arXiv:2302.06675)"),
    _optimizer(
        "muon",
        "muon:Muon",
        "MuonConfig",
        "Muon (Jordan et al. 2024) for whole hidden matrices in any layout, AdamW for the rest",
    ),
    _optimizer("novograd", "novograd:Novograd", "NovogradConfig", "NovoGrad (Ginsburg et al. 2019, arXiv:1905.11286)"),
    _optimizer("adadelta", "stock:adadelta", "AdadeltaConfig", "Adadelta (Zeiler 2012, arXiv:1212.5701), torch's"),
    _optimizer("adamax", "stock:adamax", "AdamaxConfig", "Adamax (Kingma & Ba 2015, arXiv:1412.6980), torch's"),
    _optimizer("adagrad", "stock:adagrad", "AdagradConfig", "Adagrad (Duchi et al. 2011), torch's"),
    _optimizer("rmsprop", "stock:rmsprop", "RMSpropConfig", "RMSprop (Tieleman & Hinton 2012), torch's"),
    _optimizer("rprop", "stock:rprop", "RpropConfig", "Rprop (Riedmiller & Braun 1993), torch's"),
)
"""All of them, under the names of torch and NxD Training."""
