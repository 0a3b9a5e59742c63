"""Encoders and classifiers built from checkpoints and from files of other projects."""
