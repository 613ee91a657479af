"""What a run would need, measured on the meta device under a fake process group: ``nxdt plan``."""
