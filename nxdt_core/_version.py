"""The one version number of the repository; every dist reads it from here."""

__version__ = "0.1.0"
