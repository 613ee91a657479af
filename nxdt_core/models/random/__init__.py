"""Random numbers by position: initial weights, dropout and stochastic rounding that no layout changes."""
