"""What a training step costs: hooks, the loop around it, the optimizer, layouts, compiled graphs."""
