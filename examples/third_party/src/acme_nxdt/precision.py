"""Everything in float64: slow, and right to the last digit that matters when layouts are compared."""

from nxdt_core.protocols.precision import PrecisionPolicy


def fp64(config: None = None) -> PrecisionPolicy:
    """Return the dtypes."""
    return PrecisionPolicy(name="fp64", parameters="float64", gradients="float64", optimizer_state="float64")
