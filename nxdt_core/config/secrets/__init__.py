"""Values that are not shown or written: from the environment, of secret fields, and credentials in addresses."""
