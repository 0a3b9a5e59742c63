"""Weights of other projects, and export in their formats."""
