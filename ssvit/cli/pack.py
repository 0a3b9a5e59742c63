"""Write shards of a data set, or verify them: ssvit pack data=PATH output=FOLDER. The command can be resumed."""

from pathlib import Path

from ssvit.cli.launch import Tool, progress
from ssvit.config.composed import Config
from ssvit.config.declaration import select
from ssvit.data.decode_options import RGB
from ssvit.data.files_options import ImageFiles
from ssvit.data.packing_options import Pack
from ssvit.options import OptionError, print_lines
from ssvit.training import preflight


def run(config: Config) -> Path:
    """Write the splits of a data set below a folder, or compare what is there with its checksums. Returns it."""
    plain = config.values
    own = select(Pack, plain)
    if not own.verify and plain["data"] is None:
        raise OptionError("data", None, "must name a data set, or the path of a folder")
    source = preflight.parts(plain).get("data.source")
    if own.size is not None and isinstance(source, ImageFiles) and source.pixels != RGB:
        right = "must be null for images of other channels or numbers than photographs: their files stay unchanged"
        raise OptionError("size", own.size, right)
    config.line.announce()

    from ssvit.data import packing

    output = Path(own.output)
    if own.verify:
        print_lines(packing.verify(output, progress("images", " images")))
        return output
    data = config.build("data.source")
    print_lines(*packing.pack(data, output, own, progress("images", " images")))
    print_lines(f"next: data=shards data.root={own.output}")
    return output


tool = Tool("pack", "make shards (tar files) of a data set, or verify them", run, options=Pack)
