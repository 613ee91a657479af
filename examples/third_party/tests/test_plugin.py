"""The plugin keeps what nxdt asks of every plugin."""

from nxdt_testing.plugin_contract import PluginContract


class TestAcme(PluginContract):
    """All tests are inherited."""

    plugin = "acme"
