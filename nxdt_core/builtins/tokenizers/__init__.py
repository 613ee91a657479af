"""Built-in tokenizers."""
