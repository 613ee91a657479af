"""What a component of each kind must look like, one file per kind. Types only: nothing here imports torch.

A class need not inherit from these protocols; it must have their members. A plugin's target is what the
registry imports, and each protocol's docstring says how the core calls it.
"""
