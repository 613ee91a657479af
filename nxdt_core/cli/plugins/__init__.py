"""``nxdt plugins``: the commands over installed plugins, their hooks and their versions."""
