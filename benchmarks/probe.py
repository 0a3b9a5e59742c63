"""Compare ridge regression for a sweep of penalties with scikit-learn's Ridge: python -m benchmarks.probe [ROUNDS]

The items of the rates are penalties, so the ratio is that of whole sweeps; scikit-learn fits every fourth penalty in a
round. Both end at predictions for the same test images, and scikit-learn is spared preparing the features. One thread.
"""

import sys

import numpy as np
import torch
from sklearn.linear_model import Ridge
from threadpoolctl import threadpool_limits

from ssvit.evaluation.probes.ridge import RidgePath, signs, whiten
from ssvit.evaluation.probes.ridge_options import FEW_SHOT_PROTOCOLS
from ssvit.training.benchmark import compare, table

_WIDTH, _CLASSES = 768, 10
_PENALTIES = FEW_SHOT_PROTOCOLS["paper"].l2
_SOME = _PENALTIES[::4]


@threadpool_limits.wrap(limits=1)
def main(rounds: int = 7, images: int = 50_000) -> None:
    """Measure and print the rates; the title has the largest difference of the predictions."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(_CLASSES, (images,), generator=generator)
    # Correlated, with eigenvalues over six orders of magnitude, so that small and large penalties both matter.
    mixing = torch.randn(_WIDTH, _WIDTH, generator=generator) * torch.logspace(0, -3, _WIDTH)[:, None]
    centres = torch.randn(_CLASSES, _WIDTH, generator=generator)
    train = (centres[labels] + torch.randn(images, _WIDTH, generator=generator)) @ mixing
    test = torch.randn(images // 5, _WIDTH, generator=generator) @ mixing

    def ours(l2: tuple[float, ...]) -> torch.Tensor:
        return RidgePath(whiten(train, train), signs(labels, _CLASSES)).predict(whiten(train, test), l2)

    prepared, queries = (whiten(train, part).numpy() for part in (train, test))
    targets = signs(labels, _CLASSES).numpy()

    def theirs() -> np.ndarray:
        # The constant column of the features is the intercept.
        fits = (Ridge(alpha=l2, fit_intercept=False).fit(prepared, targets) for l2 in _SOME)
        return np.stack([fit.predict(queries) for fit in fits])

    difference = np.abs(ours(_SOME).numpy() - theirs()).max()
    contenders = {
        "scikit-learn Ridge": lambda: len(theirs()),
        "ssvit, a single penalty": lambda: len(ours(_SOME[:1])),
        "ssvit": lambda: len(ours(_PENALTIES)),
    }
    title = f"ridge for {len(_PENALTIES)} penalties, {images:,} x {_WIDTH}, predictions {difference:.0e} apart"
    print(table(title, compare(contenders, reference="scikit-learn Ridge", rounds=rounds)))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
