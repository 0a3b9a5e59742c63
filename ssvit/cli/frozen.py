"""What the tools that measure frozen features share: which features of which images, the baselines, table and report.

`check` comes before torch is loaded; `measured` loads it.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.utils import instantiate
from omegaconf import DictConfig
from tqdm import tqdm

from ssvit import atomic_io
from ssvit.checkpoints import manifest
from ssvit.cli.launch import announce
from ssvit.cli.pretrained import SCRATCH, from_scratch
from ssvit.evaluation import features_rules
from ssvit.evaluation.features_rules import Reading
from ssvit.evaluation.measured import Measured
from ssvit.evaluation.measures import Measure
from ssvit.evaluation.significance import NOTHING_YET
from ssvit.options import OptionError, UserError, flag, number, one_of, whole, within
from ssvit.training import preflight

if TYPE_CHECKING:
    from ssvit.data.source import Data
    from ssvit.evaluation.banks import Banks
    from ssvit.evaluation.features import Extractor

_EXAMPLES = 3  # images in both sets that are named


def check(plain: Mapping[str, Any]) -> list[Reading]:
    """The readings that are asked for. OptionError (or UserError) unless the configuration can be."""
    if plain["checkpoint"] == SCRATCH:
        raise OptionError("checkpoint", SCRATCH, "measured beside a checkpoint by floors=true; give that")
    for name in ("train_images", "test_images"):
        if plain[name] is not None:
            whole(name, plain[name])
    whole("batch_size", plain["batch_size"])
    whole("workers", plain["workers"], at_least=0)
    number("loader_timeout", plain["loader_timeout"], 0)
    number("fabric.timeout", plain["fabric"]["timeout"], 1)
    flag("floors", plain["floors"])
    one_of("precision", plain["precision"], ("32-true", "bf16-mixed", "auto"))
    if plain["output"] is not None and not Path(plain["output"]).absolute().parent.is_dir():
        raise OptionError("output", plain["output"], "there is no such folder")
    preflight.encoder(preflight.parts(plain))
    return _readings(plain)


def _readings(plain: Mapping[str, Any]) -> list[Reading]:
    encoder = manifest.read(Path(plain["encoder"]["path"]), plain["encoder"])["encoder"]
    with within("features"):
        return features_rules.readings(encoder, **plain["features"])


def measured(
    config: DictConfig, plain: Mapping[str, Any], readings: Sequence[Reading], measures: Mapping[str, Measure]
) -> tuple["Banks", list[Measured]] | None:
    """What measures find, by the group of options that each has ("" for none); None in all processes but the main one.

    The processes share the reading of features, and the main one goes on alone. UserError if the images do not
    suffice: what their labels tell is told before a feature is read.
    """
    announce()

    import torch

    from ssvit.training import runtime
    from ssvit.training.peers import PeerGone
    from ssvit.training.recipe import Recipe

    data = _data(config, plain)
    _, test = data.reported
    for group, measure in measures.items():
        with within(group) if group else nullcontext():
            measure.check(data.train.labels, test.labels, data.classes)
    functions = _functions(config, plain, readings)
    threads = torch.get_num_threads()
    fabric = runtime.start(Recipe(precision=plain["precision"]), **plain["fabric"])
    try:
        with runtime.together():
            banks = _banks(config, plain, data, functions, fabric)
    except PeerGone:
        raise
    except UserError:
        if fabric.is_global_zero:
            raise
        return None  # all have failed alike, or the main one tells that this one has
    runtime.part()
    if not fabric.is_global_zero:
        return None
    torch.set_num_threads(threads)
    return banks, [measure(banks, told) for measure in measures.values()]


def _data(config: DictConfig, plain: Mapping[str, Any]) -> "Data":
    """Labelled images of the same classes, at most as many as are asked for; those reported on alone to measure on."""
    from ssvit.data.source import subset

    data = instantiate(config.data.source, _convert_="all")
    part, test = data.reported
    if data.train.labels is None or test.labels is None:
        raise UserError("the images have no labels: give each class a folder of its own, or another data set (data=…)")
    if test.classes != data.train.classes:
        raise UserError(f"the {part} images are of other classes than the training images")
    parts = {}
    for own, images, source in (("train", plain["train_images"], data.train), (part, plain["test_images"], test)):
        parts[own] = source if images is None else subset(source, images=min(images, len(source)))
    return replace(data, **{"validation": None, "test": None} | parts)


def _functions(config: DictConfig, plain: Mapping[str, Any], readings: Sequence[Reading]) -> dict[str, "Extractor"]:
    """The encoder of the checkpoint, and the baselines, by what goes before the names of their features."""
    import torch

    from ssvit.evaluation.features import Frozen, Pixels
    from ssvit.kernels.accelerate import accelerate
    from ssvit.randomness import key

    def frozen(node: DictConfig, weights: str) -> Frozen:
        torch.manual_seed(key(0, "weights"))
        encoder = instantiate(node, _convert_="all")
        accelerate(encoder)
        return Frozen(encoder, readings, identity=json.dumps([weights, encoder.arguments]))

    own = plain["encoder"]
    seal = manifest.read(Path(own["path"]), own)["seal"]
    functions: dict[str, Extractor] = {"": frozen(config.encoder, f"{seal}, resized as {own['resize']}")}
    if plain["floors"]:
        functions["random_"] = frozen(from_scratch(config).encoder, f"random weights of torch {torch.__version__}")
        functions["pixels"] = Pixels()
    return functions


def _banks(
    config: DictConfig, plain: Mapping[str, Any], data: "Data", functions: Mapping[str, "Extractor"], fabric: Any
) -> "Banks":
    """Read the features, each process its part, or find them kept."""
    from ssvit.evaluation.banks import Bank, Banks
    from ssvit.evaluation.features import Cache, Frozen, extract

    view = instantiate(config.data.view, _convert_="all")
    options = {name: plain[name] for name in ("batch_size", "workers")}
    options |= {"timeout": plain["loader_timeout"], "device": fabric.device}
    banks = []
    for which, source in (("training", data.train), data.reported):
        read = []
        for prefix, function in functions.items():
            if isinstance(function, Frozen):
                function.encoder.to(fabric.device)
            if fabric.is_global_zero:
                options["progress"] = told(f"{prefix.strip('_') or 'encoder'}, {which} images", " images")
            with fabric.autocast():
                if plain["cache"] is None:
                    found = extract(function, source, view, **options)
                else:
                    cache = Cache(Path(plain["cache"]))
                    found = cache.extract(function, source, view, view=plain["data"]["view"], **options)
            named = {name if name == prefix else f"{prefix}{name}": value for name, value in found.values.items()}
            read.append(replace(found, values=named))
        banks.append(Bank.of(read, source, view))
    return Banks(tuple(functions[""].identities), data.classes, *banks, data.reported[0])


def told(what: str, unit: str) -> Callable[[int, int], None]:
    """A function of (done, all) that shows how far a work is, its rate and the time left, unless it is soon done."""
    rarely = 0.5 if sys.stdout.isatty() else 10
    bar = tqdm(desc=what, unit=unit, mininterval=rarely, delay=rarely, dynamic_ncols=True, file=sys.stdout)

    def tell(done: int, total: int) -> None:
        bar.total = total
        bar.update(done - bar.n)
        if done == total:
            bar.close()

    return tell


def facts(plain: Mapping[str, Any], banks: "Banks") -> dict[str, Any]:
    """What was measured, for a file; copies: test images that are training images too, and the first of them."""
    copies = banks.copies()
    return {
        "checkpoint": plain["encoder"]["path"],
        "train_images": len(banks.train),
        "test_images": len(banks.test),
        "measured_on": banks.part,
        "chance": banks.chance,
        "classes": list(banks.classes),
        "features": {**plain["features"], "pooling": _readings(plain)[0].pooling},
        "precision": plain["precision"],
        "versions": {name: version(name) for name in ("ssvit", "torch")},
        "copies": {
            "test_images_in_train": len(copies),
            "examples": [
                {"test": banks.test.name(test), "train": banks.train.name(train)} for test, train in copies[:_EXAMPLES]
            ],
        },
    }


def opening(facts: Mapping[str, Any]) -> str:
    """What was measured, for the console: a line, and one more if images stand in both sets."""
    copies = facts["copies"]["test_images_in_train"]
    part = facts["measured_on"]
    lines = [f"{facts['checkpoint']}: {facts['train_images']} training and {facts['test_images']} {part} images, "
             f"{len(facts['classes'])} classes (chance {_percent(facts['chance'])})"]  # fmt: skip
    if copies:
        examples = ", ".join(f"{one['test']} is {one['train']}" for one in facts["copies"]["examples"])
        lines.append(f"{copies} of the {part} images stand among the training images too, pixel for pixel: {examples}"
                     + (", …" if copies > _EXAMPLES else ""))  # fmt: skip
    return "\n".join(lines)


def report(plain: Mapping[str, Any], banks: "Banks", found: Measured) -> None:
    """Print a table, a row for each feature set, and write the numbers if asked to."""
    own = facts(plain, banks)
    print(opening(own))
    rows = [["features", *found.columns]]
    for name, values in found.values.items():
        rows.append([name, *map(_percent, values, found.deviations[name])])
    print(table(rows))
    if len(banks.own) > 1:
        print(f"best: {found.best}, chosen by {found.chosen_by}, without {banks.part} labels")
    if not found.tells:
        print(f"{found.best}: not {NOTHING_YET}")
    if plain["output"] is not None:
        numbers = {"measure": found.options, "best": found.best, "chosen_by": found.chosen_by, "numbers": found.numbers}
        atomic_io.replace(Path(plain["output"]), (json.dumps(own | numbers, indent=1) + "\n").encode())


def table(rows: Sequence[Sequence[str]]) -> str:
    """Cells in columns, the first to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join([first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row, widths[1:], strict=True))])
        for first, *row in rows
    )


def _percent(share: float, deviation: float | None = None) -> str:
    """0.523 -> 52.3 %."""
    return f"{100 * share:.1f} %" + (f" ± {100 * deviation:.1f}" if deviation is not None else "")
