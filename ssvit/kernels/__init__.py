"""Provide faster implementations of layers for CPUs."""
