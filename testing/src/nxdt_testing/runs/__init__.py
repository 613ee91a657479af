"""Small runs of contracts: in one process, from a configuration, and the documents that they train on."""
