"""``nxdt plugins new``: repositories of plugins, written from templates."""
