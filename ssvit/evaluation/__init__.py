"""Evaluate encoders: features, nearest neighbours and statistics, used by panels, probes and reports."""
