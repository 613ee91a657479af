"""A stand-in. It has no submodules, so that torch-xla finds no Neuron runtime here and offers its CPU client."""


def neuron_xla_compile(*args, **kwargs):
    """Refuse: there is no compiler."""
    raise NotImplementedError("a stand-in of libneuronxla compiles nothing")


neuron_xla_wlo_compile = neuron_xla_compile
