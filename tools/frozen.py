"""What the tools that measure frozen features share: which features of which images, the floors, table and report.

`check` comes before torch is loaded; `banks` loads it.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.utils import instantiate
from omegaconf import DictConfig
from pretrained import SCRATCH, from_scratch
from tqdm import tqdm

from ssvit.evaluation import features_rules
from ssvit.evaluation.features_rules import Reading
from ssvit.options import OptionError, UserError, flag, one_of, whole, within
from ssvit.training import manifest, preflight

if TYPE_CHECKING:
    from torch import Tensor

    from ssvit.data.sources import Source


@dataclass(frozen=True)
class Banks:
    """Named features of the training and of the test images, (n, d) and (m, d), with their labels and classes' names.

    own: the names of those of the checkpoint, in the order of layers; the others are floors.
    """

    own: tuple[str, ...]
    train: dict[str, "Tensor"]
    test: dict[str, "Tensor"]
    train_labels: "Tensor"
    test_labels: "Tensor"
    classes: tuple[str, ...]


def check(plain: Mapping[str, Any]) -> list[Reading]:
    """The readings that are asked for. OptionError (or UserError) unless the configuration can be."""
    if plain["checkpoint"] == SCRATCH:
        raise OptionError("checkpoint", SCRATCH, "measured beside a checkpoint by floors=true; give that")
    for name in ("train_images", "test_images"):
        if plain[name] is not None:
            whole(name, plain[name])
    whole("batch_size", plain["batch_size"])
    whole("workers", plain["workers"], at_least=0)
    flag("floors", plain["floors"])
    one_of("precision", plain["precision"], ("32-true", "bf16-mixed", "auto"))
    one_of("device", plain["device"], ("auto", "cpu", "cuda"))
    if plain["output"] is not None and not Path(plain["output"]).absolute().parent.is_dir():
        raise OptionError("output", plain["output"], "there is no such folder")
    preflight.parts(plain)
    encoder = manifest.read(Path(plain["encoder"]["path"]))["encoder"]
    with within("features"):
        return features_rules.readings(depth=encoder["depth"], class_token=encoder["class_token"], **plain["features"])


def banks(config: DictConfig, plain: Mapping[str, Any], readings: Sequence[Reading]) -> Banks:
    """Load the images and the encoder, and read the features, or find them kept. UserError if there are no labels."""
    import torch

    from ssvit.evaluation.features import Cache, Frozen, Pixels, extract
    from ssvit.randomness import key
    from ssvit.training import engine

    one_of("device", plain["device"], ("auto", "cpu", *(["cuda"] if torch.cuda.is_available() else [])))
    device = torch.device("cuda" if plain["device"] != "cpu" and torch.cuda.is_available() else "cpu")
    half = plain["precision"] == "bf16-mixed" or (plain["precision"] == "auto" and engine.native_bfloat16(device))

    data = instantiate(config.data.source, _convert_="all")
    if data.train.labels is None or data.held_out.labels is None:
        raise UserError("the images have no labels: give each class a folder of its own, or another data set (data=…)")
    if data.held_out.classes != data.train.classes:
        raise UserError("the test images are of other classes than the training images")
    sources = {
        "train": _limited("train_images", data.train, plain),
        "test": _limited("test_images", data.held_out, plain),
    }

    def frozen(node: DictConfig, weights: str) -> Frozen:
        torch.manual_seed(key(0, "weights"))
        encoder = instantiate(node, _convert_="all").to(device)
        return Frozen(encoder, readings, identity=json.dumps([weights, encoder.arguments]))

    path = Path(plain["encoder"]["path"])
    functions: dict[str, Any] = {
        "": frozen(config.encoder, f"{manifest.read(path)['seal']}, resized as {plain['encoder']['resize']}")
    }
    if plain["floors"]:
        functions["random_"] = frozen(from_scratch(config).encoder, f"random weights of torch {torch.__version__}")
        functions["pixels"] = Pixels()
    view = instantiate(config.data.view, _convert_="all")
    options = {name: plain[name] for name in ("batch_size", "workers")} | {"device": device}
    found: dict[str, dict[str, Tensor]] = {"train": {}, "test": {}}
    labels, own = {}, ()
    for prefix, function in functions.items():
        for which, source in sources.items():
            options["progress"] = told(f"{prefix.strip('_') or 'encoder'}, {which} images")
            with torch.autocast(device.type, torch.bfloat16, enabled=half):
                if plain["cache"] is None:
                    features = extract(function, source, view, **options)
                else:
                    cache = Cache(Path(plain["cache"]))
                    features = cache.extract(function, source, view, view=plain["data"]["view"], **options)
            named = {name if name == prefix else f"{prefix}{name}": value for name, value in features.values.items()}
            found[which] |= named
            labels[which] = features.labels
        own = own or tuple(named)
    return Banks(own, found["train"], found["test"], labels["train"], labels["test"], data.train.classes)


def _limited(option: str, source: "Source", plain: Mapping[str, Any]) -> "Source":
    from ssvit.data.sources import subset

    images = plain[option]
    if images is not None and images > len(source):
        raise OptionError(option, images, f"there are {len(source)} images to choose from")
    return subset(source, images=images)


def told(what: str, unit: str = " images") -> Callable[[int, int], None]:
    """A function of (done, all) that shows how far a work is, its rate and the time left, unless it is soon done."""
    rarely = 0.5 if sys.stdout.isatty() else 10
    bar = tqdm(desc=what, unit=unit, mininterval=rarely, delay=rarely, dynamic_ncols=True, file=sys.stdout)

    def tell(done: int, total: int) -> None:
        bar.total = total
        bar.update(done - bar.n)
        if done == total:
            bar.close()

    return tell


def report(
    plain: Mapping[str, Any],
    banks: Banks,
    *,
    measure: Mapping[str, Any],
    cells: Mapping[str, Sequence[str]],
    columns: Sequence[str],
    numbers: Mapping[str, Any],
    best: str,
    by: str,
) -> None:
    """Print a table, a row for each feature set, and write its numbers if asked to.

    measure: the options of the measure, for the file. best: the feature set that was chosen, `by` what.
    """
    counts = {"train_images": len(banks.train_labels), "test_images": len(banks.test_labels)}
    print(f"{plain['encoder']['path']}: {counts['train_images']} training and {counts['test_images']} test images, "
          f"{len(banks.classes)} classes")  # fmt: skip
    rows = [["features", *columns], *([name, *row] for name, row in cells.items())]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *row in rows:
        print("  ".join([name.ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row, widths[1:], strict=True))]))
    if len(banks.own) > 1:
        print(f"best: {best}, chosen by {by}, without test labels")
    if plain["output"] is not None:
        facts = {"checkpoint": plain["encoder"]["path"], **counts, "classes": list(banks.classes)}
        asked = {name: plain[name] for name in ("features", "precision")}
        whole_report = {**facts, **asked, "measure": measure, "best": best, "chosen_by": by, "numbers": numbers}
        Path(plain["output"]).write_text(json.dumps(whole_report, indent=1) + "\n")


def percent(share: float, deviation: float | None = None) -> str:
    """0.523 -> 52.3 %."""
    return f"{100 * share:.1f} %" + (f" ± {100 * deviation:.1f}" if deviation is not None else "")
