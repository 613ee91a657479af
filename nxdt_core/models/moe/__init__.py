"""Mixtures of experts: routing, dispatch, experts and the losses that balance them."""
