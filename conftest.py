"""Fixtures that tests of the core and of plugins share."""

pytest_plugins = ["nxdt_core.testing.s3_server"]
