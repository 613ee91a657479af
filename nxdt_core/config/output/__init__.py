"""A configuration and its schema as text: YAML, Markdown, JSON Schema, reports of problems."""
