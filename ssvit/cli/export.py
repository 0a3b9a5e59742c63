"""Write a checkpoint for other libraries.

Usage: ssvit export format=onnx|safetensors|timm|torch.
"""

from pathlib import Path

from ssvit.checkpoints.checkpoint import PRETRAIN
from ssvit.config.command import Command
from ssvit.config.composed import Config
from ssvit.config.declaration import Name
from ssvit.errors import one_of, print_lines
from ssvit.exchange import options as export_options
from ssvit.exchange.options import PROGRAMS, ForeignEncoder
from ssvit.loading.finding import find_checkpoint
from ssvit.loading.options import LoadEncoder, Pretrained
from ssvit.loading.origins import origin
from ssvit.models import timm_options


class Export(export_options.Export, Pretrained):
    """A checkpoint and the format of the export: a folder with weights, their configuration and a model card."""

    output: Name | None = None
    """Folder of the export; None: export/FORMAT in the run's folder."""
    encoder: ForeignEncoder = ForeignEncoder()
    """Properties that a foreign file may not contain; None: those in the files next to it, or the usual values."""


def run(config: Config) -> None:
    """Check that the format supports the encoder; then import torch, build the encoder and write it."""
    options: Export = config.options
    encoder = options.encoder.values()
    checkpoint = find_checkpoint(
        options.checkpoint, outputs=options.outputs, stage=PRETRAIN, options=encoder, say=config.line.say
    )
    size = checkpoint.encoder["image_size"] if options.image_size is None else options.image_size
    encoder_options = timm_options.options_from(checkpoint.encoder | {"image_size": size})
    if checkpoint.has_segmenter:
        one_of("format", options.format, PROGRAMS)
    options.check_model(encoder_options, checkpoint.manifest.get("classifier"))
    run = checkpoint.home(options.outputs)
    folder = Path(options.output or run / "export" / options.format)
    options.check_folder(folder, checkpoint=checkpoint.path)
    config.line.announce()

    origins = origin("weights", checkpoint, options.checkpoint)
    from ssvit.exchange.export import export
    from ssvit.loading.encoder import load_classifier, load_encoder, load_segmenter
    from ssvit.models.encoder import Encoder
    from ssvit.objectives.classify import Classify
    from ssvit.objectives.segment import Segment

    model: Encoder | Classify | Segment
    if checkpoint.has_classifier or checkpoint.has_segmenter:
        load = load_classifier if checkpoint.has_classifier else load_segmenter
        model = load(LoadEncoder(path=checkpoint.path, image_size=size, resize=options.resize))
    else:
        changes = {"image_size": size, "resize": options.resize, **encoder}
        model = load_encoder(LoadEncoder(path=checkpoint.path, announce=True, **changes))
    remarks = export(model, folder, options, manifest=checkpoint.manifest, run=run, origins=origins)
    print_lines(f"{folder}: {', '.join(file.name for file in sorted(folder.iterdir()))}", *remarks)


command = Command("export", run, options=Export)
