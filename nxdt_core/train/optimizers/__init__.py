"""Built-in optimizers: factories over the parameter groups that the engine has made.

Those of torch work element by element and see plain shards. Those that look at whole parameters (Adafactor, Muon,
NovoGrad) are here, since torch's would take a shard for the whole.
"""
