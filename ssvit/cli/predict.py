"""Predict the classes of pictures: ssvit predict checkpoint=PATH PICTURES…"""

import json
from pathlib import Path

from ssvit.atomic_io import replace
from ssvit.checkpoints.checkpoint import FINETUNE
from ssvit.checkpoints.finding import find
from ssvit.cli.launch import Tool
from ssvit.config.composed import Config
from ssvit.data import folder, pseudo_labels
from ssvit.data.pseudo_labels import PseudoLabel
from ssvit.options import OptionError, UserError, file_to_write, number, print_lines, whole

_ANSWERS = ('[\n {\n  "image": ', "[]\n")  # how their JSON begins


def run(config: Config) -> None:
    """Print the most probable classes of each picture, or those above the threshold where it may have several.

    Pictures that cannot be read are named, and the status is 1.
    """
    plain = config.values
    whole("top", plain["top"])
    number("threshold", plain["threshold"], 0, 1)
    number("confidence", plain["confidence"], 0, 1)
    if plain["per_class"] is not None:
        whole("per_class", plain["per_class"])
    as_table = str(plain["output"] or "").endswith(".csv")
    if plain["labelled"] is not None:
        pseudo_labels.check(str(plain["labelled"]))
        if not as_table:
            raise OptionError("labelled", plain["labelled"], "goes into a table: output=NAME.csv")
    if plain["output"] is not None:
        file_to_write("output", plain["output"], begins=[pseudo_labels.HEADING] if as_table else _ANSWERS)
    if not plain["images"]:
        raise OptionError("images", "", "name pictures, or folders of them, after the options")
    paths = [path for image in plain["images"] for path in folder.pictures(str(image))]
    checkpoint = find(plain["checkpoint"], outputs=plain["outputs"], stage=FINETUNE, say=config.line.say)
    config.line.announce()

    from ssvit import inference

    classifier = inference.classifier(checkpoint)
    names = classifier.classes
    print_lines(f"{checkpoint.path}: {len(names)} classes")
    if as_table and classifier.is_multi_label:
        raise OptionError("output", plain["output"], "must be a JSON file: a table has one class for each picture")
    answers, labels, unreadable = [], [], 0
    for path, answer in classifier.name_files(paths):
        if isinstance(answer, UserError):
            unreadable += 1
            print_lines(answer)
            continue
        best = answer.topk(len(answer) if classifier.is_multi_label else min(plain["top"], len(answer)))
        named = [(names[i], p) for p, i in zip(best.values.tolist(), best.indices.tolist(), strict=True)]
        labels.append(PseudoLabel(path, *named[0]))
        several, least = classifier.is_multi_label, plain["threshold"]
        answers.append(
            {
                "image": path,
                "classes": [
                    {"class": name, "probability": p, **({"present": p >= least} if several else {})}
                    for name, p in named
                ],
            }
        )
        if several:
            named = [(name, p) for name, p in named if p >= least]
        print_lines(f"{path}: {', '.join(f'{name} {100 * p:.1f} %' for name, p in named) or 'none of the classes'}")
    if as_table:
        kept = pseudo_labels.chosen(labels, confidence=plain["confidence"], per_class=plain["per_class"])
        replace(Path(plain["output"]), pseudo_labels.written(kept, plain["labelled"]))
        print_lines(f"{plain['output']}: {len(kept)} of {len(labels)} pictures have a pseudo-label")
    elif plain["output"] is not None:
        replace(Path(plain["output"]), (json.dumps(answers, indent=1) + "\n").encode())
    if unreadable:
        raise UserError(f"{unreadable} of {len(paths)} pictures could not be read")


tool = Tool("predict", "name the classes of pictures", run, positional="images")
