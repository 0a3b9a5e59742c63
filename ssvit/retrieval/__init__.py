"""Stores of image features and the search in them."""
