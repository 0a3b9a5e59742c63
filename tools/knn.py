"""The vote of the nearest training images by an encoder's frozen features: python tools/knn.py checkpoint=PATH"""

from typing import Any

import frozen
from launch import launch
from omegaconf import DictConfig
from pretrained import offer

from ssvit.evaluation import knn_rules
from ssvit.options import OptionError, one_of


def main(config: DictConfig, plain: dict[str, Any]) -> None:
    """Print the accuracy for each number of neighbours; each training image's own neighbours choose the layer."""
    readings = frozen.check(plain)
    one_of("protocol", plain["protocol"], knn_rules.PROTOCOLS)
    _, ks = knn_rules.knn([plain["protocol"]], plain["k"])

    import torch

    from ssvit.evaluation.knn import knn

    banks = frozen.banks(config, plain, readings)
    count = len(banks.train_labels)
    if ks[-1] >= count:
        raise OptionError("k", ks[-1], f"must be below {count}, the training images")
    shared = {"classes": len(banks.classes), "protocols": [plain["protocol"]], "k": ks}
    cells, numbers, left_out = {}, {}, {}
    for name, train in banks.train.items():
        found = knn(train, banks.train_labels, banks.test[name], banks.test_labels, **shared)
        cells[name] = [frozen.percent(score.top1) for score in found.scores]
        numbers[name] = {
            "top1": {score.k: score.top1 for score in found.scores},
            "top5": {score.k: score.top5 for score in found.scores},
            "test_images_in_train": len(found.duplicates[:, 0].unique()),
        }
        if len(banks.own) > 1 and name in banks.own:
            own = knn(train, banks.train_labels, train, banks.train_labels, own=torch.arange(count), **shared)
            left_out[name] = max(score.top1 for score in own.scores)
            numbers[name]["leave_one_out"] = {score.k: score.top1 for score in own.scores}
    best = max(banks.own, key=lambda name: left_out.get(name, 0))
    frozen.report(plain, banks, measure={"protocol": plain["protocol"], "k": ks}, cells=cells,
                  columns=[f"{k}-NN" for k in ks], numbers=numbers, best=best,
                  by="leave-one-out on the training images")  # fmt: skip
    if same := numbers[best]["test_images_in_train"]:
        print(f"{same} test images look the same to the encoder as a training image")


if __name__ == "__main__":
    launch("knn", main, before=offer)
