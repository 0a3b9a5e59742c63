"""Analyse trained encoders (attention, filters, inductive biases) and sets of images (defects)."""
