"""Support for the Neuron runtime and compiler, Trainium machines and the devices of torch-xla."""
