"""Define the names of the evaluated encoder and of its baselines."""

OWN = ""  # name of the evaluated encoder; encoders for comparison have other names
RANDOM, PIXELS = "random weights", "pixels"
RANDOM_PREFIX = "random_"  # prefix of the feature sets of the random-weight encoder
