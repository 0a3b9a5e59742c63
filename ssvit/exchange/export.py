"""Export a checkpoint as a folder for other libraries: weights, configuration and model card, written atomically."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from ssvit.data.augment.options import CenterCrop
from ssvit.engine.atomic_io import replaced_folder, write
from ssvit.errors import UserError, within
from ssvit.exchange import card, graph, preprocessing, program, timm
from ssvit.exchange.layouts import TIMM, TIMM_HEAD
from ssvit.exchange.options import CARD, CONFIG, GRAPH, OURS, PROGRAM, PROGRAMS, TORCH, WEIGHTS, Export
from ssvit.exchange.tensor_mapping import OPTIONAL, per_channel
from ssvit.models.encoder import Encoder
from ssvit.models.timm import Timm
from ssvit.models.vit import ViT
from ssvit.objectives.classify import Classify
from ssvit.objectives.classify_options import MULTI_LABEL
from ssvit.objectives.segment import Segment

Head = Classify | Segment


def export(
    model: Encoder | Head, folder: Path, options: Export, *, manifest: Mapping[str, Any], run: Path,
    origins: Sequence[Mapping[str, str]] = (),
) -> list[str]:  # fmt: skip
    """Write the folder of an export and return remarks about it.

    Args:
        model: The encoder, classifier or segmentation model.
        folder: The folder.
        options: Options of the export.
        manifest: Manifest of the checkpoint.
        run: Folder of its run, whose options and metrics the card lists.
        origins: Rows of `ssvit.loading.origins.origin`.

    Raises:
        OptionError: See `Export.check_folder`.
        UserError: The folder cannot be written.
    """
    options.check_folder(folder)
    try:
        with replaced_folder(folder.resolve()) as part:  # resolves a link to its target
            return _write(model, part, options, manifest, run, origins)
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({error.strerror or error})") from None


def _write(
    model: Encoder | Head, folder: Path, options: Export, manifest: Mapping[str, Any], run: Path,
    origins: Sequence[Mapping[str, str]],
) -> list[str]:  # fmt: skip
    encoder, head = (model.encoder, model) if isinstance(model, Head) else (model, None)
    classes = () if head is None else head.classes
    with within("view"):
        trained = CenterCrop(**{"size": encoder.image_size, **(manifest.get("view") or {})})
        view = trained.for_size(encoder.image_size)
    pixels = {name: manifest.get(name) for name in ("range", "background")}
    windows = head.options if isinstance(head, Segment) else None
    description = preprocessing.sentence(view, pixels["range"], pixels["background"], windows)
    is_scaled = pixels["range"] and options.format != OURS  # ssvit reads the range from its own format
    scaling = ["images must be scaled to [0, 1] first, as the model card describes"] if is_scaled else []
    if options.format == OURS:
        assert not isinstance(head, Segment)  # the command has checked this, here and for timm
        remarks = _ours(encoder, head, folder, {"view": view.values(), **pixels})
    else:
        if options.format in PROGRAMS:
            assert isinstance(encoder, ViT)  # `Export.check_model` has checked this
            origin = {**pixels, "step": manifest["step"], "checkpoint": manifest.get("seal")}
            stored = {**_metadata(encoder, head), "view": view.values(), **origin}
            remarks = _program(encoder, head, folder, " ".join([description, *scaling]), options, stored)
        else:
            assert isinstance(encoder, ViT | Timm)
            assert not isinstance(head, Segment)
            transform, remarks = preprocessing.timm(view)
            _json(folder / CONFIG, timm.config(encoder, classes, transform))
            remarks = _weights(folder, _of_timm(encoder, head)) + remarks
    remarks += scaling
    if _is_multi_label(head):
        remarks.append("multi-label classifier: its probabilities are the sigmoid of each logit, not a softmax")
    text = card.write(
        run=run,
        step=manifest["step"],
        encoder=encoder.arguments,
        options=options,
        preprocessing=description,
        classes=classes,
        task="segmentation" if isinstance(head, Segment) else "classification",
        remarks=remarks,
        origins=origins,
    )
    write(folder / CARD, text.encode())
    return remarks


def _json(path: Path, content: Mapping[str, object]) -> None:
    write(path, json.dumps(content, indent=1).encode())


def _weights(folder: Path, tensors: Mapping[str, Tensor]) -> list[str]:
    write(folder / WEIGHTS, safetensors.torch.save(dict(tensors), metadata={"format": "pt"}))
    return [f"{len(tensors)} tensors, {sum(tensor.numel() for tensor in tensors.values()) / 1e6:.2f} million numbers"]


def _is_multi_label(head: Head | None) -> bool:
    return isinstance(head, Classify) and head.options.loss == MULTI_LABEL


def _metadata(encoder: Encoder, head: Head | None) -> dict[str, object]:
    return {"encoder": encoder.arguments} if head is None else head.metadata


def _ours(encoder: Encoder, head: Classify | None, folder: Path, images: Mapping[str, object]) -> list[str]:
    model, prefix = (encoder, "encoder.") if head is None else (head, "")
    _json(folder / CONFIG, {**_metadata(encoder, head), **images})
    return _weights(folder, {prefix + name: value.contiguous() for name, value in model.state_dict().items()})


def _of_timm(encoder: ViT | Timm, head: Classify | None) -> Mapping[str, Tensor]:
    """Return the tensors of an encoder and of a classifier's head as timm names them; None: no head."""
    if isinstance(encoder, ViT):
        return converted(encoder, head)
    if head is None:
        return encoder.model.state_dict()
    assert isinstance(head.head, nn.Linear)  # `Export.check_model` has checked this
    return encoder.with_head(head.head).state_dict()


@torch.no_grad()
def converted(encoder: ViT, head: Classify | None) -> dict[str, Tensor]:
    """Return timm's tensors of an encoder and of a classifier's head; None: no head.

    Positions of any kind are exported as the rows (t, d) that are added, zeros if there are none. An encoder with
    registers has rows for the patches only, and the row of its class token is added to the token. All class tokens but
    the first are exported as registers.
    """
    state, options = encoder.state_dict(), encoder.arguments
    special = [name for name in ("class_token", "distillation_token") if name in state]
    count = options["class_tokens"]
    rows = torch.zeros(count * len(special) + encoder.patches, encoder.width)
    if len(encoder.positions):
        rows = encoder.positions[0]()
    if special and (options["registers"] or count > 1):
        tokens, rows = state["class_token"] + rows[:count], rows[count:]
        registers = torch.cat([tokens[:, 1:], state.get("register_tokens", tokens[:, :0])], 1)
        state |= {"class_token": tokens[:, :1], "register_tokens": registers}
    state["positions.0.embedding"] = rows
    p, q = encoder.patch_size
    sizes = {"c": encoder.channels, "p": p, "q": q}
    absent = [name for name in OPTIONAL if name.format(i=0) not in state]
    mappings = [*TIMM.mappings(depth=len(encoder.blocks), absent=absent), *TIMM_HEAD]
    if head is not None:
        state |= head.state_dict()
    tensors = dict(mapping.write(state[mapping.ours], sizes) for mapping in mappings if mapping.ours in state)
    # Copies, since safetensors rejects tensors that share memory.
    return {name: value.contiguous().clone() for name, value in tensors.items()}


def _program(
    encoder: ViT, head: Head | None, folder: Path, description: str, options: Export, stored: Mapping[str, object]
) -> list[str]:
    """Write a program with its metadata in the same file, and compare it with the model.

    Args:
        encoder: The encoder.
        head: The model with its head; None for an encoder.
        folder: The folder.
        description: Description of the evaluation transform.
        options: Options of the export.
        stored: Manifest of the export, from which ssvit opens a graph.
    """
    any_size = f"of any size that is divisible by the patch size; positions are resized by resize={options.resize}"
    remarks = [f"any number of images, {any_size if options.any_size else 'all of one size'}"]
    metadata = {
        "images": f"(batch, {encoder.channels}, height, width), float32 in [0, 1]",
        "image_size": list(encoder.image_size),
        "any_size": options.any_size,
        "patch_size": list(encoder.patch_size),
        "normalisation": "inside the program: images are not normalised",
        "mean": per_channel(encoder.arguments["mean"], encoder.channels),
        "std": per_channel(encoder.arguments["std"], encoder.channels),
        "preprocessing": description,
        **({} if head is None else {"classes": list(head.classes)}),
        **({"probabilities": "the sigmoid of each logit"} if _is_multi_label(head) else {}),
        graph.MANIFEST: {**stored, "precision": options.quantize or 32},
    }
    model = program.Program(encoder if head is None else head, options).eval()
    name, reader = (PROGRAM, "torch.export") if options.format == TORCH else (GRAPH, "onnxruntime")
    file = folder / name
    program.write(model, metadata, file)
    difference = program.difference(model, file)
    if difference is None:
        return [*remarks, "not compared with onnxruntime, which is not installed"]
    if not difference < program.TOLERANCE:
        reason = f"the outputs of {reader} differ by {difference:.1g}; nothing was written"
        raise UserError(f"format={options.format}: {reason}")
    remarks.append(f"largest difference between torch and {reader}: {difference:.1e}")
    if options.quantize:
        program.quantize(file)
        cosine = program.cosine(model, file)
        remarks.append(f"quantised to 8 bits: lowest cosine with the outputs in float32 {cosine:.4f} on random images")
    return remarks
