"""Saving: who writes what, staging, commit, retention and the background thread."""
