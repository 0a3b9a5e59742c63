"""A plug-in with an encoder of convolutions."""

from ssvit.choices import add

add("encoder", "conv", "with_conv.encoder.Conv")
