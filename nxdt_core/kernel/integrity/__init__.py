"""Digests of the installed plugins, and the lock file that pins them."""
