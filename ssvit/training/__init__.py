"""Training: the loop, the state of a run, hyperparameters and reporting."""
