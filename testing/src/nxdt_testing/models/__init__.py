"""Models for tests of layouts."""
