"""Evaluate encoders: features, nearest neighbours and statistics, used by evaluators, probes and reports."""
