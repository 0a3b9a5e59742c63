"""Write the features of images to a file.

Usage: ssvit embed checkpoint=PATH data=PATH output=features.npz.
"""

import os
from functools import partial
from pathlib import Path

from ssvit.config.command import Command
from ssvit.config.composed import Config
from ssvit.data.sources import folder
from ssvit.data.sources.base_options import SHORT_FORMS
from ssvit.data.sources.datasets_options import Csv, Folder
from ssvit.options import print_lines
from ssvit.retrieval import describer
from ssvit.retrieval.options import ALL, PARTS, Embed
from ssvit.retrieval.options import pictures as named_pictures


def run(config: Config) -> Path:
    """Write names, classes and features of images to a file; the same command resumes an interrupted one."""
    options: Embed = config.options
    chosen = options.data and options.data.source
    # Images of test/ may have other classes than those of train/, or none, so a folder is read by file names only.
    by_name = chosen if isinstance(chosen, Folder) and options.split == ALL else None
    splits: dict[str, dict[str, str | None]] = {}
    loose, left_out = [*options.images], 0
    if by_name:
        for part, folders in zip(PARTS, by_name.splits, strict=True):
            if folders == by_name.roots:
                loose += folders
            elif folders:
                splits[part] = named_pictures(folders)
    if loose or options.data is None:
        splits[""] = named_pictures(loose)
    if by_name:
        files = {os.path.abspath(path) for root in by_name.roots for path in folder.pictures(root)}
        left_out = len(files.difference(*splits.values()))
    _, of_checkpoint, pixels = describer.check(config)
    config.line.announce()

    from ssvit.data.decode import load
    from ssvit.retrieval import embedding, gallery

    read: gallery.Load = partial(load, pixels=pixels)
    if options.data is not None and by_name is None:
        called = str(config.choices.get("data"))
        data = describer.data_set(config, pixels)
        sizes = {part: len(source) for part in PARTS if (source := getattr(data, part)) is not None}
        written = [*sizes] if options.split == ALL else [options.split]
        for part in written:
            splits[part], read = gallery.of_data_set(called, data, part, read)
        every = sum(1 for _ in chosen.rows()) if isinstance(chosen, Csv) else sum(sizes.values())
        left_out = every - sum(len(splits[part]) for part in written)
    describe = of_checkpoint(load=read, batch_size=options.batch_size, workers=options.workers)
    print_lines(embedding.embed(splits, describe, Path(options.output), left_out=left_out))
    return Path(options.output)


command = Command("embed", run, expansions=SHORT_FORMS, positional="images", options=Embed)
