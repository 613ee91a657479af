"""``nxdt report`` and ``nxdt watch``: the records of runs as one HTML page. It imports neither torch nor a plugin."""
