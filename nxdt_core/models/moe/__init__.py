"""Mixtures of experts: routing, dispatch, experts and the losses that balance them."""

from nxdt_core.models.moe.layer import MixtureOfExperts

__all__ = ["MixtureOfExperts"]
