"""Define the probes of frozen features, one module for each."""
