"""Analyse trained encoders: attention, filters, position embeddings, similarity of layers."""
