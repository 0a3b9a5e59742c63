"""Descriptions of figures, and their rendering by matplotlib."""
