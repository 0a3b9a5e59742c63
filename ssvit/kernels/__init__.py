"""Faster implementations of layers for CPUs."""
