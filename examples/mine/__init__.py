"""Parts of your own, one of each kind, each with its options next to it: docs/extending.md explains them."""
