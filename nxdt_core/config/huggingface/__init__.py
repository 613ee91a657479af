"""Values of a Hugging Face ``config.json`` in the section ``model``."""
