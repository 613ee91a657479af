"""Mixtures of experts of transformers with the expert matrices and the router loss of this project."""
