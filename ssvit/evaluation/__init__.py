"""Evaluation of encoders: features, nearest neighbours and statistics, on which panels, probes and reports build."""
