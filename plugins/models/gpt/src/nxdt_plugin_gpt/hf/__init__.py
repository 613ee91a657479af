"""Exchange with Hugging Face: GPT-2 and GPT-NeoX."""
