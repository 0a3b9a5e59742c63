"""Analyse trained encoders: attention, filters, position embeddings."""
