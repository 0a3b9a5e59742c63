"""Studies of several runs: comparisons, scaling, sweeps, VTAB and robustness."""
