"""Weights of other frameworks, read and written."""
