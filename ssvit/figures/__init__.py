"""Describe figures and render them by matplotlib."""
