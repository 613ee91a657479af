"""Data files: paths, compression, encodings, records and caches."""
