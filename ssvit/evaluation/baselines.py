"""Define the names of the evaluated encoder and of its baselines."""

OWN = ""  # name of the evaluated encoder among those that it is compared with
RANDOM, PIXELS = "random weights", "pixels"
RANDOM_PREFIX = "random_"  # prefix of the feature sets of the random-weight encoder
