"""Augmentations: one module for each kind."""
