"""Components that plugins register, and the registry that finds them."""
