"""The base class of each kind of component, one file per kind; nothing here imports torch.

A component's class inherits from the base class of its kind, which has defaults for what is optional
(:func:`nxdt_core.components.class_of`). Optimizers, schedules and precisions are functions.
"""
