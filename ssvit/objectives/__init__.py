"""Objectives: one module for each training method."""
