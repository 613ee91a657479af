"""Dataclass fields as configuration keys: types, names, components and documentation."""
