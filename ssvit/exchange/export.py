"""Export a checkpoint as a folder for other libraries: weights, configuration and model card, written atomically."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from ssvit.atomic_io import replaced_folder, write
from ssvit.exchange import card, dinov3, huggingface, timm, writing
from ssvit.exchange.export_options import (
    CARD,
    CONFIG,
    GRAPH_FILES,
    GRAPHS,
    INPUTS,
    ONNX,
    OURS,
    PREPROCESSOR,
    PROGRAM,
    TIMM,
    WEIGHTS,
    Export,
)
from ssvit.exchange.layout import per_channel
from ssvit.exchange.preprocessing import Preprocessing
from ssvit.models.encoder import Encoder
from ssvit.models.vit import ViT
from ssvit.objectives.classify import Classify
from ssvit.objectives.classify_options import MULTI_LABEL
from ssvit.options import UserError


def export(
    model: Encoder | Classify, folder: Path, options: Export, *, facts: Mapping[str, Any], run: Path
) -> list[str]:
    """Write the folder of an export and return remarks about it.

    Args:
        model: The encoder or classifier.
        folder: The folder.
        options: Options of the export.
        facts: Manifest of the checkpoint.
        run: Folder of its run, whose options and metrics the card lists.

    Raises:
        OptionError: See `Export.check_folder`.
        UserError: The folder cannot be written.
    """
    options.check_folder(folder)
    try:
        with replaced_folder(folder.resolve()) as part:  # resolves a link to its target
            return _write(model, part, options, facts, run)
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({error.strerror or error})") from None


def _write(model: Encoder | Classify, folder: Path, options: Export, facts: Mapping[str, Any], run: Path) -> list[str]:
    encoder, head = (model.encoder, model) if isinstance(model, Classify) else (model, None)
    preprocessing = Preprocessing.of(facts, encoder.image_size)
    if options.format == OURS:
        remarks = _ours(encoder, head, folder)
    else:
        assert isinstance(encoder, ViT)  # `Export.check_model` has checked this
        if options.format in GRAPHS:
            remarks = _program(encoder, head, folder, preprocessing, options)
        else:
            remarks = (_timm if options.format == TIMM else _huggingface)(encoder, head, folder, preprocessing)
    remarks += preprocessing.remarks()
    if head is not None and head.options.loss == MULTI_LABEL:
        remarks.append("multi-label classifier: its probabilities are the sigmoid of each logit, not a softmax")
    text = card.write(
        run=run,
        step=facts["step"],
        encoder=encoder.arguments,
        options=options,
        preprocessing=preprocessing.sentence(),
        classes=_classes(head),
        remarks=remarks,
    )
    write(folder / CARD, text.encode())
    return remarks


def _classes(head: Classify | None) -> Sequence[str]:
    return () if head is None else head.classes


def _json(path: Path, content: Mapping[str, object]) -> None:
    write(path, json.dumps(content, indent=1).encode())


def _weights(path: Path, tensors: Mapping[str, Tensor]) -> list[str]:
    write(path, safetensors.torch.save(dict(tensors), metadata={"format": "pt"}))
    return [f"{len(tensors)} tensors, {sum(tensor.numel() for tensor in tensors.values()) / 1e6:.2f} million numbers"]


def _ours(encoder: Encoder, head: Classify | None, folder: Path) -> list[str]:
    model, prefix = (encoder, "encoder.") if head is None else (head, "")
    _json(folder / CONFIG, {"encoder": encoder.arguments} if head is None else head.facts)
    state = {prefix + name: value.contiguous() for name, value in model.state_dict().items()}
    return _weights(folder / WEIGHTS, state)


def _timm(encoder: ViT, head: Classify | None, folder: Path, preprocessing: Preprocessing) -> list[str]:
    resized, remarks = preprocessing.timm()
    layout, config = timm.TIMM, timm.config(encoder, _classes(head), resized)
    if encoder.rotary is not None:
        layout, config = dinov3.timm_export(encoder, _classes(head), resized)
        remarks += dinov3.remarks(encoder)
    _json(folder / CONFIG, config)
    if encoder.stem is not None and encoder.stem.epsilons != "timm":
        epsilons = "timm's hybrids have other epsilons than the authors', which this one has"
        remarks = [f"{epsilons}: outputs differ by some 1e-4", *remarks]
    return _weights(folder / WEIGHTS, writing.tensors(layout, encoder, head)) + remarks


def _huggingface(encoder: ViT, head: Classify | None, folder: Path, preprocessing: Preprocessing) -> list[str]:
    resized, remarks = preprocessing.huggingface()
    _json(folder / PREPROCESSOR, huggingface.preprocessor(encoder, resized))
    dinov2 = huggingface.is_dinov2(encoder.arguments)
    layout = huggingface.DINOV2 if dinov2 else huggingface.HUGGINGFACE
    several = head is not None and head.options.loss == MULTI_LABEL
    config = huggingface.config(encoder, _classes(head), multi_label=several)
    if encoder.rotary is not None:
        layout, config = dinov3.huggingface_export(encoder)
        remarks += dinov3.remarks(encoder)
    _json(folder / CONFIG, config)
    tensors = writing.tensors(layout, encoder, head, prefix="" if head is None else "vit.")
    if dinov2:  # DINOv2's model has a mask token, used only in training
        shape = (1, encoder.width) if encoder.rotary is None else (1, 1, encoder.width)
        tensors["embeddings.mask_token"] = torch.zeros(shape)
    return _weights(folder / WEIGHTS, tensors) + remarks


def _program(
    encoder: ViT, head: Classify | None, folder: Path, preprocessing: Preprocessing, options: Export
) -> list[str]:
    """Write a graph, as ONNX or torch.export, with its metadata in the same file."""
    from ssvit.exchange import program

    any_size = f"of any size that the patches divide; positions resized as {options.resize}"
    remarks = [f"any number of images, {any_size if options.any_size else 'all of one size'}"]
    metadata = {
        "images": f"(batch, {encoder.channels}, height, width), {INPUTS[options.input]}",
        "image_size": list(encoder.image_size),
        "any_size": options.any_size,
        "patch_size": list(encoder.patch_size),
        "normalisation": "inside the program: give images as they are",
        "mean": per_channel(encoder.arguments["mean"], encoder.channels),
        "std": per_channel(encoder.arguments["std"], encoder.channels),
        "preprocessing": " ".join([preprocessing.sentence(), *preprocessing.remarks()]),
        **({} if head is None else {"classes": list(head.classes)}),
        **({"probabilities": "the sigmoid of each logit"} if head and head.options.loss == MULTI_LABEL else {}),
    }
    model = program.Program(encoder if head is None else head, options).eval()
    if options.format == PROGRAM:
        program.write_torch(model, metadata, folder / GRAPH_FILES[PROGRAM])
        return remarks
    path = folder / GRAPH_FILES[ONNX]
    program.write_onnx(model, metadata, path)
    difference = program.difference(model, path)
    if difference is None:
        return [*remarks, "not compared with onnxruntime, which is not installed"]
    if not difference < program.TOLERANCE:
        raise UserError(f"format=onnx: onnxruntime gives outputs that differ by {difference:.1g}; nothing was written")
    return [*remarks, f"largest difference from torch in onnxruntime {difference:.1e}"]
