"""Define the options of logistic regression."""

from ssvit.config.declaration import Count, Different
from ssvit.evaluation.probes.linear_options import Linear


class Logistic(Linear):
    """Fit multinomial logistic regression by full-batch L-BFGS."""

    l2s: Different = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
    """L2 penalties to choose from (scikit-learn's C is 1 / (n l2)); the bias is not penalised."""
    iterations: Count = 500
    """Maximum number of iterations of a fit."""
