"""``nxdt plan``: the command, its report and its search."""
