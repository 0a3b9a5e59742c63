"""A checkpoint as a folder that others open: weights, their configuration, and a model card, all there or nothing."""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch

from ssvit.atomic_io import synchronise, write
from ssvit.exchange import card, huggingface, options, timm, writing
from ssvit.exchange.layout import per_channel
from ssvit.exchange.preprocessing import Preprocessing
from ssvit.models.vit import ViT
from ssvit.objectives.classify import Classify
from ssvit.options import OptionError, UserError

WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class _Asked:
    """What a writer needs besides the model: see `export`; preprocessing: as the checkpoint's evaluation has it."""

    any_size: str | None
    input: str
    preprocessing: Preprocessing


def export(
    model: ViT | Classify, folder: Path, *, format: str, any_size: str | None, facts: Mapping[str, Any], run: Path,
    overwrite: bool, input: str = options.FLOAT,
) -> list[str]:  # fmt: skip
    """Write a folder; returns what is to be said of it.

    any_size: how positions are resized in a program that takes images of any size, None for one that does not. input:
    what images a program takes, one of `options.INPUTS`. facts: the checkpoint's manifest. run: the folder of its
    run, whose options and results the card tells. OptionError if the folder is there and `overwrite` is not set;
    UserError if the disk refuses.
    """
    if folder.exists() and not overwrite:
        raise OptionError("output", folder, "is there; overwrite=true replaces it")
    encoder = model if isinstance(model, ViT) else model.encoder
    part, old = (folder.with_name(f".{folder.name}.{what}") for what in ("part", "old"))
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        preprocessing = Preprocessing.of(facts, encoder.image_size)
        outputs, remarks = _WRITERS[format](model, part, _Asked(any_size, input, preprocessing))
        remarks = [*remarks, *preprocessing.remarks(), *_probabilities(model)]
        text = card.write(
            name=run.name,
            format=format,
            facts={**facts, "encoder": encoder.arguments},
            input=input,
            outputs=outputs,
            preprocessing=preprocessing.sentence(),
            normalisation={name: per_channel(encoder.arguments[name], encoder.channels) for name in ("mean", "std")},
            results=card.measured(run, facts["step"]),
            configuration=card.trained(run),
            classes=_classes(model),
            remarks=remarks,
        )
        write(part / "README.md", text.encode())
        synchronise(part)
        if folder.exists():
            folder.rename(old)
        part.rename(folder)
        synchronise(folder.parent)
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({error.strerror or error})") from None
    finally:
        for leftover in (part, old):
            shutil.rmtree(leftover, ignore_errors=True)
    return remarks


def _probabilities(model: ViT | Classify) -> list[str]:
    """What is to be said where the softmax of a classifier's outputs is not what it was trained for."""
    if isinstance(model, ViT) or model.options.loss == "softmax":
        return []
    return ["the classifier was trained with sigmoid: its probabilities are the sigmoid of each logit, not a softmax"]


def _classes(model: ViT | Classify) -> Sequence[str]:
    return () if isinstance(model, ViT) else model.classes


def _json(path: Path, content: Mapping[str, Any]) -> None:
    write(path, json.dumps(content, indent=1).encode())


def _weights(path: Path, tensors: Mapping[str, Any]) -> list[str]:
    write(path, safetensors.torch.save(dict(tensors), metadata={"format": "pt"}))
    return [f"{len(tensors)} tensors, {sum(tensor.numel() for tensor in tensors.values()) / 1e6:.2f} million numbers"]


def _ours(model: ViT | Classify, folder: Path, asked: _Asked) -> tuple[Sequence[str], list[str]]:
    state = {name if isinstance(model, Classify) else f"encoder.{name}": v for name, v in model.state_dict().items()}
    facts = {"encoder": model.arguments} if isinstance(model, ViT) else model.facts
    _json(folder / "config.json", facts)
    return ("tokens",), _weights(folder / WEIGHTS, {name: value.contiguous() for name, value in state.items()})


def _timm(model: ViT | Classify, folder: Path, asked: _Asked) -> tuple[Sequence[str], list[str]]:
    encoder, head = (model, None) if isinstance(model, ViT) else (model.encoder, model)
    resized, remarks = asked.preprocessing.timm()
    _json(folder / "config.json", timm.config(encoder, _classes(model), resized))
    told = _weights(folder / WEIGHTS, writing.tensors(timm.TIMM, encoder, head))
    return ("tokens",), [*told, *timm.inexact(encoder), *remarks]


def _huggingface(model: ViT | Classify, folder: Path, asked: _Asked) -> tuple[Sequence[str], list[str]]:
    encoder, head = (model, None) if isinstance(model, ViT) else (model.encoder, model)
    _json(folder / "config.json", huggingface.config(encoder, _classes(model)))
    resized, remarks = asked.preprocessing.huggingface()
    _json(folder / "preprocessor_config.json", huggingface.preprocessor(encoder, resized))
    tensors = writing.tensors(huggingface.HUGGINGFACE, encoder, head, prefix="" if head is None else "vit.")
    return ("tokens",), [*_weights(folder / WEIGHTS, tensors), *remarks]


def _torch_export(model: ViT | Classify, folder: Path, asked: _Asked) -> tuple[Sequence[str], list[str]]:
    from ssvit.exchange import program

    traced = program.Program(model, how=asked.any_size, input=asked.input).eval()
    program.write_torch(program.trace(traced), _metadata(model, asked), folder / "model.pt2")
    return traced.outputs, [_sizes(asked.any_size)]


def _onnx(model: ViT | Classify, folder: Path, asked: _Asked) -> tuple[Sequence[str], list[str]]:
    from ssvit.exchange import program

    traced = program.Program(model, how=asked.any_size, input=asked.input).eval()
    path = folder / "model.onnx"
    program.write_onnx(program.trace(traced), traced.outputs, _metadata(model, asked), path)
    found = program.difference(traced, path)
    if found is None:
        return traced.outputs, [_sizes(asked.any_size), "not held against onnxruntime, which is not installed"]
    if not found < program.TOLERANCE:
        raise UserError(f"format=onnx: onnxruntime gives outputs that differ by {found:.1g}; nothing was written")
    return traced.outputs, [_sizes(asked.any_size), f"largest difference from torch in onnxruntime {found:.1e}"]


def _metadata(model: ViT | Classify, asked: _Asked) -> dict[str, Any]:
    """What a program's file says of itself, for one who has that file alone."""
    encoder = model if isinstance(model, ViT) else model.encoder
    return {
        "images": f"(batch, {encoder.channels}, height, width), {options.INPUTS[asked.input]}",
        "image_size": list(encoder.image_size),
        "any_size": asked.any_size is not None,
        "patch_size": list(encoder.patch_size),
        "normalisation": "inside the program: give images as they are",
        "mean": per_channel(encoder.arguments["mean"], encoder.channels),
        "std": per_channel(encoder.arguments["std"], encoder.channels),
        "preprocessing": " ".join([asked.preprocessing.sentence(), *asked.preprocessing.remarks()]),
        **({"classes": list(model.classes)} if isinstance(model, Classify) else {}),
    }


def _sizes(any_size: str | None) -> str:
    if any_size is None:
        return "any number of images, all of one size"
    return f"any number of images, of any size that the patches divide; positions resized as {any_size}"


_WRITERS: Mapping[str, Callable[..., tuple[Sequence[str], list[str]]]] = {
    options.ONNX: _onnx,
    options.PROGRAM: _torch_export,
    options.OURS: _ours,
    options.TIMM: _timm,
    options.HUGGINGFACE: _huggingface,
}
