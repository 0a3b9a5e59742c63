"""The options of the loader."""

FULL, SCALED = DECODINGS = "full", "scaled"  # how much of a JPEG is decoded
