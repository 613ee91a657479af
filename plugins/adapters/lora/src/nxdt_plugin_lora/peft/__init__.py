"""Exchange with the library peft: its directories, its configuration and the names of its tensors."""
