"""The Vision Transformer, its hybrids, and models of timm as encoders."""
