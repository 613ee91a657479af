"""Reading committed checkpoints: status, verification, loading and comparison."""
