"""Turns a builder's plain module into this rank's pipeline stages, with layers of the library instead of plain ones."""
