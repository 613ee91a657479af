"""From a builder's plain module to this rank's pipeline stages, with the library's layers in the place of its own."""
