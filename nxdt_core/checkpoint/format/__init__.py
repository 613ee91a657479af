"""The checkpoint format: manifest, index, shards, digests and signatures."""
