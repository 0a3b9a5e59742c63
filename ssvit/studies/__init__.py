"""Run studies of several runs: comparisons, scaling, sweeps and tables."""
