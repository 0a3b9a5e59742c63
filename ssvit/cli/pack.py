"""Write shards of a data set. The command can be resumed.

Usage: ssvit pack data=PATH output=FOLDER.
"""

from pathlib import Path

from ssvit import advice
from ssvit.config.command import Command
from ssvit.config.composed import Config
from ssvit.data.sources.base_options import SHORT_FORMS, ImageFiles
from ssvit.data.sources.datasets_options import Csv, Folder, HuggingFace, Pack
from ssvit.data.sources.decode_options import RGB
from ssvit.engine.progress import progress
from ssvit.errors import OptionError, print_lines
from ssvit.values import text_of


def run(config: Config) -> Path:
    """Write the splits of a data set to a folder; return the folder."""
    options: Pack = config.options
    if options.data is None:
        raise OptionError("data", None, "must name a data set, or the path of a folder")
    source = options.data
    if options.size is not None and isinstance(source, ImageFiles) and source.pixels.changed(background=None) != RGB:
        raise OptionError("size", options.size, "must be null for images other than 8-bit RGB, which are not resized")
    if isinstance(source, HuggingFace) and source.pixels.changed(background=None) != RGB:
        name = "channels" if source.range is None else "range"
        expected = "must not be set: images of this library are packed as 8-bit RGB"
        raise OptionError(f"data.{name}", getattr(source, name), expected)
    if isinstance(source, Folder | Csv) and source.masked:
        name = "masks" if isinstance(source, Folder) else "mask"
        raise OptionError(f"data.{name}", getattr(source, name), "must be null, since shards contain no masks")
    config.line.announce()

    from ssvit.data.sources import packing

    output = Path(options.output)
    data = options.build_part("data")
    print_lines(*filter(None, [data.summary]))
    print_lines(*packing.pack(data, output, options, progress("images", " images")))
    advice.print_next(advice.written(config.line, "pretrain", [f"data={text_of(output.absolute())}"]))
    return output


command = Command("pack", run, expansions=SHORT_FORMS, options=Pack)
