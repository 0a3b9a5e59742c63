"""A linear layer on an encoder's frozen features: python tools/linear_probe.py checkpoint=PATH"""

from dataclasses import asdict
from typing import Any

import frozen
from launch import launch
from omegaconf import DictConfig
from pretrained import offer

from ssvit.options import one_of, within


def main(config: DictConfig, plain: dict[str, Any]) -> None:
    """Print the accuracy of the best layer of each feature set, chosen on the images held out of training."""
    readings = frozen.check(plain)
    one_of("method", plain["method"], ("sgd", "logistic"))
    options = plain[plain["method"]]

    from ssvit.evaluation.linear_probe import Logistic, SgdProbe

    with within(plain["method"]):
        probe = SgdProbe(**options) if plain["method"] == "sgd" else Logistic(**options)
    banks = frozen.banks(config, plain, readings)
    labels = (banks.train_labels, banks.test_labels)
    cells, numbers = {}, {}
    for name, train in banks.train.items():
        shared = {
            "classes": len(banks.classes),
            "names": banks.classes,
            "progress": frozen.told(name, " steps" if plain["method"] == "sgd" else " fits"),
        }
        if plain["method"] == "sgd":
            found = probe({name: train}, labels[0], {name: banks.test[name]}, labels[1], **shared)
            chosen, numbers[name] = found.best, asdict(found.best) | {"validation_grid": found.grid[name]}
            strength = f"{chosen.learning_rate:g}"
        else:
            chosen = probe(train, labels[0], banks.test[name], labels[1], **shared)
            numbers[name], strength = asdict(chosen), f"{chosen.l2:g}"
        cells[name] = [strength, *map(frozen.percent, (chosen.train, chosen.validation, chosen.test))]
    best = max(banks.own, key=lambda name: numbers[name]["validation"])
    frozen.report(plain, banks, measure={plain["method"]: options}, cells=cells,
                  columns=["learning rate" if plain["method"] == "sgd" else "l2", "train", "validation", "test"],
                  numbers=numbers, best=best, by="validation accuracy")  # fmt: skip


if __name__ == "__main__":
    launch("linear_probe", main, before=offer)
