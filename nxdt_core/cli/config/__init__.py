"""``nxdt config``, and the checks that need a model or a tokenizer."""
