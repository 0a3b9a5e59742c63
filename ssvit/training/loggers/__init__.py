"""Loggers: one module for each destination of the metrics of a run."""
