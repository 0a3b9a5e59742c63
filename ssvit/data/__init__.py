"""From files, memory or thin air to uint8 batches, each a pure function of the seed and the step."""
