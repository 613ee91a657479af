"""Processes of one run: their environment, store, process group and collectives. No engine is named here."""
