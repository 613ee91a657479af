"""What the engine on stock torch asks of layouts: its record names it, and ``nxdt config check`` calls it. No torch."""
