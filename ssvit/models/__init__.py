"""Implement encoders: the Vision Transformer, its hybrids, and timm models."""
