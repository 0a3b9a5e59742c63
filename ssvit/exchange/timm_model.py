"""Read a file of weights of a timm model, which stays a timm model; the user sets its name."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssvit.exchange import files
from ssvit.exchange.files import ForeignError
from ssvit.exchange.layout import IMAGENET, described
from ssvit.exchange.reading import Foreign, choose, first_of
from ssvit.models import timm_options
from ssvit.options import OptionError, UserError

if TYPE_CHECKING:
    from torch import Tensor

_SIZE = 224  # default image size without one in config.json or in the model's name
# Buffers in files of older versions of timm, which a model computes itself.
_COMPUTED = re.compile(r"(^|\.)(num_batches_tracked|relative_position_index|attn_mask)$")


@dataclass(frozen=True)
class TimmFile(Foreign):
    """Hold the description of a timm model in a file; the classifier's weights are not read."""

    def weights(self) -> "dict[str, Tensor]":
        """Return the state dict of the encoder.

        Raises:
            ForeignError: Tensors are missing, unexpected or of a wrong shape.
        """
        from ssvit.models.timm import Timm

        encoder = Timm(timm_options.Timm(**self.arguments))
        state = encoder.model.state_dict()
        wanted = {name: tensor for name, tensor in state.items() if not _COMPUTED.search(name)}
        shapes = files.shapes(self.path)
        first = re.escape(next(iter(wanted)))
        prefix = next((found[1] for name in shapes if (found := re.fullmatch(rf"(|.+\.){first}", name))), "")
        inside = {name.removeprefix(prefix): name for name in shapes if name.startswith(prefix)}
        classifier = encoder.model.pretrained_cfg.get("classifier") or ()
        heads = tuple(f"{name}." for name in ([classifier] if isinstance(classifier, str) else classifier))
        unexpected = [name for name in inside if name not in wanted and not _COMPUTED.search(name)]
        wrong = {
            "missing": [name for name in wanted if name not in inside],
            "unexpected": [name for name in unexpected if not name.startswith(heads)],
            "of another shape": [
                name for name, one in wanted.items() if name in inside and shapes[inside[name]] != tuple(one.shape)
            ],
        }
        if any(wrong.values()):
            told = "; ".join(f"{what}: {first_of(names)}" for what, names in wrong.items() if names)
            size = "x".join(map(str, encoder.image_size))
            raise ForeignError(f"{self.path}: is not timm's {self.arguments['model']} for images of {size}: {told}")
        tensors = files.tensors(self.path, [inside[name] for name in wanted])
        state |= {name: tensors[inside[name]] for name in wanted}
        return {"mean": encoder.mean, "std": encoder.std, **{f"model.{name}": one for name, one in state.items()}}


def read(path: Path, given: Mapping[str, Any]) -> TimmFile:
    """Return the description of the timm model in a file.

    Args:
        path: The file.
        given: The user's options, including "model".

    Raises:
        OptionError: An option is missing or invalid.
        UserError: The config.json does not describe a timm model.
    """
    if given.get("heads") is not None:
        raise OptionError("heads", given["heads"], "is for a ViT; timm's models have arguments={…}")
    if given.get("model") is None:
        raise OptionError("arguments", given["arguments"], "needs encoder.model, a name of timm's")
    config = described(path.parent / "config.json")
    trained = config.get("pretrained_cfg") or {}
    if not isinstance(trained, Mapping):
        raise UserError(f"{path.parent / 'config.json'}: does not describe a model as timm does")
    sides = [int(side) for side in re.findall(r"_(\d{3,4})(?=_|\.|$)", given["model"])]
    usual = {"mean": IMAGENET["mean"], "std": IMAGENET["std"], "trained_size": sides[-1] if sides else _SIZE}
    known = {name: trained.get(name) for name in ("mean", "std")}
    known["trained_size"] = (trained.get("input_size") or (None,))[1:] or None
    chosen, sources = choose(tuple(usual), usual, known, given)
    chosen = {name: list(value) if isinstance(value, tuple) else value for name, value in chosen.items()}
    notes = [f"{name} {chosen[name]} {sources[name]}" for name in usual]
    shapes = files.shapes(path)
    arguments = {
        "model": given["model"],
        "image_size": chosen["trained_size"],
        "channels": 3,
        "arguments": dict(given.get("arguments") or {}),
        "mean": chosen["mean"],
        "std": chosen["std"],
    }
    timm_options.Timm(**arguments)
    notes.insert(0, f"timm's {given['model']}, {len(shapes)} tensors")
    return TimmFile(path, {}, (), arguments, tuple(notes), masks_keys=False)
