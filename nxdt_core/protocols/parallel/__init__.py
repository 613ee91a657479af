"""What a parallel engine looks like, and the values that it exchanges with the core."""
