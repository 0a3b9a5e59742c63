"""Descriptions of figures, and their drawing by matplotlib."""
