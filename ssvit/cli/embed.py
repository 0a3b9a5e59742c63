"""Write the features of images to a file.

Usage: ssvit embed checkpoint=PATH data=PATH output=features.npz|features.parquet.
"""

from dataclasses import replace
from pathlib import Path

from ssvit.config.command import Command
from ssvit.config.composed import Config
from ssvit.data.sources.base_options import SHORT_FORMS
from ssvit.data.sources.datasets_options import Folder
from ssvit.engine import atomic_io
from ssvit.errors import OptionError, print_lines
from ssvit.models.encoder_options import PATCHES
from ssvit.retrieval.extraction import Extraction
from ssvit.retrieval.options import ALIASES, ALL, PARQUET, PARTS, Embed
from ssvit.retrieval.options import pictures as listed


def run(config: Config) -> Path:
    """Write names, classes and features of images to a file; the same command resumes an interrupted one."""
    options: Embed = config.options
    chosen = options.data
    # A folder is read by file names only: the classes of test/ may differ from those of train/, or be absent.
    by_name = chosen if isinstance(chosen, Folder) and options.split == ALL else None
    files: dict[str, dict[str, str | None]] = {}
    loose = [*options.images]
    if by_name:
        for part, folders in zip(PARTS, by_name.splits, strict=True):
            if folders == (by_name.root,):
                loose += folders
            elif folders:
                files[part] = listed(folders)
    if loose or options.data is None:
        files[""] = listed(loose)
    line, name = config.line, str(config.choices.get("data"))
    extraction = Extraction(options, typed_names=line.typed, choice=name, say=line.say, store=options.anomaly)
    if extraction.spec.pooling == PATCHES and Path(options.output).suffix != PARQUET:
        raise OptionError("output", options.output, f"must end in {PARQUET} with features.pooling={PATCHES}")
    config.line.announce()

    from ssvit.retrieval import gallery
    from ssvit.retrieval.feature_table import Thumbnails
    from ssvit.retrieval.pictures import Opener, PictureSet, viewer
    from ssvit.retrieval.store import Store

    splits = {part: PictureSet.of_files(of_part, extraction.pixels) for part, of_part in files.items()}
    if options.data is not None and by_name is None:
        data = extraction.data_set()
        if options.split == ALL and data.undivided is not None:  # the held-out images are a random choice
            data = replace(data, train=data.undivided, test=None)
        parts = [part for part in PARTS if getattr(data, part) is not None] if options.split == ALL else [options.split]
        splits |= {part: PictureSet.of_split(data, part, name) for part in parts}
    splits = {part: pictures.windows(options) for part, pictures in splits.items()}
    describe = extraction.describer()
    opened = Opener(extraction.pixels, splits.values())
    show = viewer(opened, describe.transform, extraction.display())
    thumbnails = None if options.thumbnail is None else Thumbnails(show, options.thumbnail)
    reference = None if options.anomaly is None else Store.open(options.anomaly, describe.extractor.identity)
    output = Path(options.output)
    lines, anomalies = gallery.embed(
        splits, describe, output, image_size=extraction.image_size, reference=reference, thumbnails=thumbnails
    )
    if anomalies and options.sheet is not None:
        atomic_io.replace(Path(options.sheet), anomalies.sheet(show).png())
        lines += [f"written: {options.sheet}", *opened.report(options.sheet)]
    print_lines(*lines)
    return output


command = Command("embed", run, expansions=SHORT_FORMS, positional="images", options=Embed, aliases=ALIASES)
