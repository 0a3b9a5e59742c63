"""A plug-in with an encoder of convolutions."""
