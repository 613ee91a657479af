"""Wrong precision policies, each with one mistake that a real author could make, under the contract.

Not collected by name: ``test_precision_mutants.py`` runs this file and expects failures.
"""

from __future__ import annotations

import itertools

import pytest
from nxdt_testing.precision_contract import PrecisionContract

from nxdt_core.protocols.precision import PrecisionPolicy

MUTANTS = []


def mutant(factory):
    factory.__module__ = PrecisionPolicy.__module__  # this one imports torch, with the contract
    MUTANTS.append(factory)
    return factory


def policy(**changed):
    return PrecisionPolicy(**{"name": "narrow", "parameters": "bfloat16", "master_weights": True, **changed})


@mutant
def Right(section):
    return policy()


@mutant
def ReturnsADtype(section):
    import torch

    return policy(gradients=torch.float32)


@mutant
def HasNoName(section):
    return policy(name="")


CALLS = itertools.count()


@mutant
def CountsItsCalls(section):
    return policy(name=f"narrow-{next(CALLS)}")


@mutant
def ImportsNumpy(section):
    """As if it were written in a module that does."""
    return policy()


ImportsNumpy.__module__ = "tests.testing.mutants.imports_numpy"


@mutant
def KeepsMastersOfFloat32(section):
    return policy(parameters="float32")


@mutant
def SumsInLess(section):
    return policy(parameters="float32", gradients="bfloat16", master_weights=False)


@mutant
def LosesSmallUpdates(section):
    return policy(master_weights=False)


@mutant
def UpdatesInFloat16(section):
    half = dict.fromkeys(("parameters", "gradients", "optimizer_state"), "float16")
    return policy(**half, master_weights=False)


def under_contract(made):
    class Contract(PrecisionContract):
        @pytest.fixture
        def factory(self):
            return made

    return type(f"Test{made.__name__}", (Contract,), {})


for _mutant in MUTANTS:
    globals()[f"Test{_mutant.__name__}"] = under_contract(_mutant)
