"""Probes of frozen features: one module for each."""
