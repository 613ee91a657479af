"""A caller's module as a model of the core: its calls, its plan, its pipeline stages, its configuration."""
