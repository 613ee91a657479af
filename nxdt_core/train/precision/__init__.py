"""Built-in precision policies: data, no torch. What engines do with them is in :mod:`nxdt_core.engine`."""
