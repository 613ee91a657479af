"""What happens around the steps, one concern a file."""
