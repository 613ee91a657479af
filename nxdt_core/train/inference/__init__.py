"""Trained models at work: loading, text generation and evaluation."""
