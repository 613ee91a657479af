"""The files that NxD Core's API saves and loads: tags of the core's checkpoints, and files of single ranks."""
