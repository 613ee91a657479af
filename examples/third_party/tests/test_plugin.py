"""The plugin keeps what nxdt asks of every plugin."""

from nxdt_core.testing.plugin_contract import PluginContract


class TestAcme(PluginContract):
    """All tests are inherited."""

    plugin = "acme"
