"""The names of the encoders that are measured next to the one in question."""

OWN = ""  # the encoder in question among those that are measured beside it, by their names
RANDOM, PIXELS = "random weights", "pixels"
RANDOM_PREFIX = "random_"  # of the names of the feature sets of random weights
