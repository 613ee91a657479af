"""Calls of plugin hooks: checks, order, and a typed facade."""
