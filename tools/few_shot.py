"""Least squares on a few images of each class, by frozen features: python tools/few_shot.py checkpoint=PATH"""

from dataclasses import asdict
from typing import Any

import frozen
from launch import launch
from omegaconf import DictConfig
from pretrained import offer

from ssvit.evaluation import few_shot_rules


def main(config: DictConfig, plain: dict[str, Any]) -> None:
    """Print the accuracy for each number of shots; leave-one-out on the most shots chooses the layer."""
    readings = frozen.check(plain)
    options = {name: plain[name] for name in ("shots", "seeds", "l2")}
    asked = few_shot_rules.few_shot(plain["protocol"], **options)

    from ssvit.evaluation.few_shot import few_shot

    banks = frozen.banks(config, plain, readings)
    labels, classes = (banks.train_labels, banks.test_labels), len(banks.classes)
    cells, numbers, left_out = {}, {}, {}
    for name, train in banks.train.items():
        found = few_shot(train, labels[0], banks.test[name], labels[1], classes=classes, names=banks.classes,
                         protocol=plain["protocol"], **options)  # fmt: skip
        cells[name] = [frozen.percent(score.mean, score.deviation) for score in found.scores]
        numbers[name] = [asdict(score) for score in found.scores]
        if len(banks.own) > 1 and name in banks.own:
            most = max(found.scores, key=lambda score: score.fits[0].images)
            left_out[name] = sum_left_out(most, train, labels[0], classes)
    best = max(banks.own, key=lambda name: left_out.get(name, (0, 0)))
    frozen.report(plain, banks, measure={"protocol": plain["protocol"], **asdict(asked)}, cells=cells,
                  columns=[f"{score.shots} shot" for score in found.scores], numbers=numbers, best=best,
                  by="leave-one-out on the most shots")  # fmt: skip


def sum_left_out(score: Any, train: Any, labels: Any, classes: int) -> tuple[int, float]:
    """What the fits to all images but one say of those: how many are right, and less the squared error, over draws."""
    import torch

    from ssvit.evaluation.few_shot import RidgePath, Signs, Whitened, draw

    right, error = 0, 0.0
    for fit in score.fits:
        shots = slice(None) if fit.seed is None else slice(score.shots)
        places = torch.cat([images[shots] for images in draw(labels, classes, fit.seed or 0)])
        path = RidgePath(Whitened.by_its_own(train[places]), Signs(labels[places], classes))
        for y, said in path.leave_one_out([fit.l2]):
            right += (said[0].argmax(-1) == y.argmax(-1)).sum().item()
            error += (said[0] - y).square().sum().item()
    return right, -error


if __name__ == "__main__":
    launch("few_shot", main, before=offer)
