"""Starting processes for tests: ranks, commands on a terminal, and imports that forks share."""
