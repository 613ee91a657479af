"""From datasets to the micro-batches of a step: order, packing, collation, prefetching and the exact position.

File formats do not live here but in the dataset plugins. Importing this package imports neither torch nor
numpy; the modules do as they need.
"""
