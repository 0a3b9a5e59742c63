"""Evaluations during training on held-out images: one module for each objective, probes and label-free measures."""
