"""Plot internal representations of an encoder.

Usage: ssvit visualize checkpoint=PATH IMAGES….
"""

from pathlib import Path

from ssvit.analysis.options import Visualize, plotted
from ssvit.config.command import Command
from ssvit.config.composed import Config
from ssvit.config.declaration import Tree
from ssvit.data.sources import folder
from ssvit.data.sources.base_options import SHORT_FORMS
from ssvit.errors import print_lines
from ssvit.loading.options import pixel_format
from ssvit.loading.pretrained import add_placeholders, select_checkpoint
from ssvit.models.timm_options import vit


def run(config: Config) -> None:
    """Plot the figures and print the numbers; unreadable images are reported and skipped."""
    options: Visualize = config.options
    paths = folder.paths(options.images)
    Tree(options.changed(data=None) if paths else options).check()
    checkpoint = options.encoder.checkpoint()
    layer, pooling = plotted(vit(checkpoint.encoder), layer=options.layer, pooling=options.pooling)
    config.line.announce()

    from ssvit.analysis import inside
    from ssvit.data.sources.base import Source
    from ssvit.data.sources.files import Files
    from ssvit.figures.display import Display

    device = inside.device_of(options.device)
    held_out = None if paths else options.build_part("data").validation_or_test
    source: Source = held_out or Files(paths, pixels=pixel_format(checkpoint))
    pictures = inside.read_pictures(source, options.build_part("data.view"), options.count, **options.reading)
    report = inside.analyse(
        options.build_part("encoder").to(device), pictures, layer=layer, pooling=pooling, shown=options.shown,
        batch_size=options.batch_size, display=Display.of_data(options.data),
    )  # fmt: skip
    report.numbers |= {"checkpoint": str(checkpoint.path), "step": checkpoint.step}
    written = report.save(Path(options.output or checkpoint.home(options.outputs) / "visualize"))
    print_lines(*report.lines, *(f"written: {file}" for file in written))


command = Command(
    "visualize",
    run,
    expansions=SHORT_FORMS,
    before=select_checkpoint,
    stand_in=add_placeholders,
    positional="images",
    options=Visualize,
)
