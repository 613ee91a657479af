"""Tests that every precision policy must pass; its author subclasses this once for each set of options.

Example, the whole test file of a plugin::

    from nxdt_testing.precision_contract import PrecisionContract

    class TestMyPrecision(PrecisionContract):
        @pytest.fixture
        def factory(self):
            return my_precision

Training is by the built-in engine on the host, whose bfloat16 is that of an accelerator.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from typing import Any, ClassVar, get_args

import pytest
import torch

from nxdt_core.protocols.precision import DType, PrecisionFactory, PrecisionPolicy
from nxdt_testing.contract import ComponentContract, difference
from nxdt_testing.processes.side_effects import assert_light
from nxdt_testing.runs.run import Run, global_batch, run_config, small_decoder

__all__ = ["PrecisionContract"]

_DTYPES = get_args(DType)
_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
_RATE, _STEPS = 1e-2, 4
_FLOAT32 = PrecisionPolicy(name="fp32")
_CLOSE = 0.02
"""Allowed difference of a loss to that in float32, relative: bfloat16 has 8 bits."""
_SMALL_LR, _KEPT = 2e-5, 0.5
"""A rate whose steps are below half of bfloat16's spacing, and the share of the sum of steps that must arrive."""
_SMALL_STEPS = 8


class PrecisionContract(ComponentContract):
    """The tests of a precision policy: subclass it and override the fixture ``factory``."""

    keeps_small_updates: ClassVar[bool] = True
    """False for a policy that loses, on purpose, updates below the rounding of its parameters."""

    @pytest.fixture
    def policy(self, factory: PrecisionFactory, section: Any) -> PrecisionPolicy:
        """Return the policy of one run."""
        return factory(section)

    def test_it_is_a_policy_of_known_dtypes(self, policy: PrecisionPolicy) -> None:
        """Names, so that a policy is read without torch."""
        assert isinstance(policy, PrecisionPolicy), (
            f"the factory returns a {type(policy).__name__}; return a PrecisionPolicy"
        )
        assert policy.name, "the policy has no name, which errors and logs print"
        for name in ("parameters", "gradients", "optimizer_state", "autocast"):
            dtype = getattr(policy, name)
            valid = dtype in _DTYPES or (name == "autocast" and dtype is None)
            assert valid, f"{name} is {dtype!r}; use one of {', '.join(_DTYPES)} as text"

    def test_the_same_section_gives_the_same_policy(self, factory: PrecisionFactory, section: Any) -> None:
        """All ranks call the factory, and a resumed run again."""
        first, again = factory(section), factory(section)
        differing = [
            field.name for field in fields(PrecisionPolicy) if getattr(first, field.name) != getattr(again, field.name)
        ]
        assert not differing, f"called twice with one section, the factory gives another {', '.join(differing)}"

    def test_its_module_imports_nothing_heavy(self, factory: PrecisionFactory) -> None:
        """`nxdt config check` calls the factory, and does not import torch."""
        assert_light(factory.__module__)

    def test_its_dtypes_agree(self, policy: PrecisionPolicy) -> None:
        """Masters and rounding are of narrow parameters; nothing is summed in less than it is computed in."""
        narrow = policy.parameters in ("bfloat16", "float16")
        assert narrow or not policy.master_weights, (
            f"it keeps float32 masters of parameters that are {policy.parameters}: that is a second copy for nothing"
        )
        assert narrow or not policy.stochastic_rounding, f"it rounds into {policy.parameters}, which is not rounded to"
        assert narrow or policy.autocast is None or _BYTES[policy.autocast] < _BYTES[policy.parameters], (
            f"autocast computes in {policy.autocast}, which is not narrower than the parameters ({policy.parameters})"
        )
        assert _BYTES[policy.gradients] >= _BYTES[policy.parameters], (
            f"gradients are summed in {policy.gradients}, which is narrower than the parameters ({policy.parameters})"
        )

    def test_it_trains_as_float32_does(self, policy: PrecisionPolicy) -> None:
        """Losses of some steps agree within the rounding of 8 bits."""
        wanted, _ = _trained(_FLOAT32)
        losses, _ = _trained(policy)
        wrong = difference(losses, wanted, "in float32", rtol=_CLOSE)
        assert not wrong, wrong

    def test_small_updates_are_not_lost(self, policy: PrecisionPolicy) -> None:
        """At a rate whose single steps bfloat16 rounds away, weights move as far as in float32, on average."""
        if not self.keeps_small_updates:
            pytest.skip("it loses updates below the rounding of its parameters on purpose")
        _, wanted = _trained(_FLOAT32, lr=_SMALL_LR, steps=_SMALL_STEPS)
        _, weights = _trained(policy, lr=_SMALL_LR, steps=_SMALL_STEPS)
        along = sum(float((weights[name] * wanted[name]).sum()) for name in wanted)
        share = along / sum(float(update.square().sum()) for update in wanted.values())
        assert share >= _KEPT, (
            f"after {_SMALL_STEPS} steps at a rate of {_SMALL_LR:g} weights have moved {share:.0%} of the way that "
            "they move in float32; keep master weights, or round stochastically"
        )


@cache
def _trained(
    policy: PrecisionPolicy, *, lr: float = _RATE, steps: int = _STEPS
) -> tuple[Mapping[int, float], Mapping[str, torch.Tensor]]:
    """Losses by step, and how far the weights have moved."""
    builder, config = small_decoder(), run_config("model.optim.name=adamw", f"model.optim.lr={lr}")
    with Run(config, builder=builder, policy=policy) as run:
        run.steps(global_batch(builder.vocab_size), steps)
        return dict(enumerate(run.losses, start=1)), run.moved()
