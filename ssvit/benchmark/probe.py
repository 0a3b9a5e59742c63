"""Ridge regression of frozen features for a sweep of penalties, compared with scikit-learn's Ridge, a fit for each.

The items of the rates are penalties, so the ratio is that of whole sweeps; scikit-learn fits every fourth penalty in a
round. All end at predictions for the same test images; scikit-learn is spared preparing the features. One thread.
"""

import numpy as np
import torch
from sklearn.linear_model import Ridge
from threadpoolctl import threadpool_limits

from ssvit.benchmark.timing import Rate, compare, threads
from ssvit.evaluation.probes.ridge import RidgePath, signs, whiten
from ssvit.evaluation.probes.ridge_options import FEW_SHOT_PROTOCOLS

_IMAGES, _TEST, _WIDTH, _CLASSES = 50_000, 10_000, 768, 10
_PENALTIES = FEW_SHOT_PROTOCOLS["paper"].l2
_SOME = _PENALTIES[::4]


@threads(1)
@threadpool_limits.wrap(limits=1)
def run(*, rounds: int = 7) -> dict[str, list[Rate]]:
    """Rates in penalties a second; the title says how far apart the predictions are."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(_CLASSES, (_IMAGES,), generator=generator)
    # Correlated, with eigenvalues over six orders of magnitude: small and large penalties both have a say.
    mixing = torch.randn(_WIDTH, _WIDTH, generator=generator) * torch.logspace(0, -3, _WIDTH)[:, None]
    centres = torch.randn(_CLASSES, _WIDTH, generator=generator)
    train = (centres[labels] + torch.randn(_IMAGES, _WIDTH, generator=generator)) @ mixing
    test = torch.randn(_TEST, _WIDTH, generator=generator) @ mixing

    def ours(l2: tuple[float, ...]) -> torch.Tensor:
        return RidgePath(whiten(train, train), signs(labels, _CLASSES)).predict(whiten(train, test), l2)

    prepared, queries = (whiten(train, part).numpy() for part in (train, test))
    targets = signs(labels, _CLASSES).numpy()

    def theirs() -> np.ndarray:
        # The constant column of the features is the intercept.
        fits = (Ridge(alpha=l2, fit_intercept=False).fit(prepared, targets) for l2 in _SOME)
        return np.stack([fit.predict(queries) for fit in fits])

    apart = np.abs(ours(_SOME).numpy() - theirs()).max()
    title = f"ridge for {len(_PENALTIES)} penalties, {_IMAGES:,} x {_WIDTH}, predictions {apart:.0e} apart"
    contenders = {
        "scikit-learn Ridge": lambda: len(theirs()),
        "ssvit, a single penalty": lambda: len(ours(_SOME[:1])),
        "ssvit": lambda: len(ours(_PENALTIES)),
    }
    return {title: compare(contenders, reference="scikit-learn Ridge", rounds=rounds)}
