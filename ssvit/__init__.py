"""ssvit: self-supervised pre-training of Vision Transformers by masked patch prediction."""
