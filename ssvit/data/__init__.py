"""Images: decoding, augmentation, batches, and the loader."""
