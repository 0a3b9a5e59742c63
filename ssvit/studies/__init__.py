"""Run studies of several runs: comparisons, scaling, sweeps, VTAB and robustness."""
