"""The base class of each kind of component, one file per kind; nothing here imports torch.

A component's class inherits from the base class of its kind, which has defaults for what is optional
(:meth:`nxdt_core.kernel.RegisteredComponent.load_class`). Optimizers, schedules and precisions are functions.
"""
