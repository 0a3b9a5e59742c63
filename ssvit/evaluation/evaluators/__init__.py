"""Evaluate models on held-out images during training, with one module for each objective or kind of measure."""
