"""PyTorch Lightning's module, strategy and data module for runs of nxdt."""
