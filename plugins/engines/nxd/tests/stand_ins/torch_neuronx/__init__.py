"""A stand-in; see :mod:`closed_packages`. Annotations of the library name classes that the real one registers."""

from types import SimpleNamespace

import torch
from closed_packages import open_up

__version__ = "2.9.0"

open_up(__name__)
torch.classes.neuron = SimpleNamespace(SPMDModel=type("SPMDModel", (), {}), LayoutTransformation=type("Layout", (), {}))
