"""Implement the training objectives, one module for each method."""
