"""Conformance kits that plugin authors subclass once. They need pytest."""
