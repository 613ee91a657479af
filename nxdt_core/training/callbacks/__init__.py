"""What happens around the steps, one concern a file. Callbacks of Lightning; the loop itself is Lightning's."""
