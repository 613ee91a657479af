"""Configurations of NxD Training, NeMo 1.x and neuronx-nemo-megatron as configurations of nxdt."""
