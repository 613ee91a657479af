"""Stores for tests: in memory, failing on purpose, and used by several processes."""
