"""Checkpoints and run folders: written, read and verified. No module here builds a model."""
