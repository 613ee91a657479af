"""How commands write to a terminal: tables, sizes, progress, and a closed output."""
