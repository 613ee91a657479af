"""The built-in storage backend: a local or mounted directory."""
