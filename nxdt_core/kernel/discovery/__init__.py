"""Finds installed and local plugins and imports their entry modules."""
