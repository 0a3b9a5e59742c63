"""Find similar images.

Usage: ssvit retrieve action=index|query|remove store=FOLDER IMAGES…|data=SET.
"""

import json
from pathlib import Path
from typing import Any

from ssvit import advice
from ssvit.config.command import Command
from ssvit.config.composed import Config
from ssvit.data.sources.base_options import SHORT_FORMS
from ssvit.engine import atomic_io
from ssvit.errors import print_lines
from ssvit.evaluation.options import AUTO
from ssvit.retrieval.extraction import Extraction
from ssvit.retrieval.options import ALIASES, FEWEST, INDEX, PARTS, REMOVE, Retrieve
from ssvit.retrieval.options import pictures as listed


def run(config: Config) -> None:
    """Add images to a store, remove them, or query it; unreadable files are reported and skipped."""
    options: Retrieve = config.options
    if options.action == REMOVE:
        from ssvit.retrieval.gallery import remove

        config.line.announce()
        print_lines(*remove(options.store, [*map(str, options.images)]))
        return
    files = listed(options.images) if options.images or options.data is None else {}
    line, name = config.line, str(config.choices.get("data"))
    extraction = Extraction(options, typed_names=line.typed, choice=name, say=line.say, store=options.store)

    from ssvit.retrieval import gallery
    from ssvit.retrieval.pictures import Opener, PictureSet
    from ssvit.retrieval.store import Store

    data = None if options.data is None else extraction.data_set()
    if data is not None and not files:
        pictures = PictureSet.of_split(data, options.split, name)
    else:
        pictures = PictureSet.of_files(files, extraction.pixels)
    pictures, describe = pictures.windows(options), extraction.describer()
    grey: list[str] = []
    if options.action == INDEX:
        lines = gallery.index(options.store, pictures, describe, extraction.checkpoint.path)
    else:
        store, standardize = Store.open(options.store, describe.extractor.identity), options.standardize
        if standardize == AUTO:
            standardize = len(store) >= FEWEST and extraction.needs_standardizing(line)
        search: Any = {"k": options.k, "standardize": standardize, "patch": options.patch}
        records = gallery.query(store, pictures, describe, options.index, **search)
        if options.output is not None:
            atomic_io.replace(Path(options.output), (json.dumps(records, indent=1) + "\n").encode())
        if options.sheet is not None:
            sources = {f"{name}/{part}": getattr(data, part, None) for part in PARTS}
            sets = [PictureSet.of_source(source, start) for start, source in sources.items() if source is not None]
            opened = Opener(extraction.pixels, sets)
            shown = gallery.sheet(records, opened, extraction.display(), describe.transform)
            atomic_io.replace(Path(options.sheet), shown.png())
            grey = opened.report(options.sheet)
        lines = [*gallery.report(records, store), *grey]
    line.announce()
    print_lines(*lines, *(f"written: {file}" for file in (options.output, options.sheet) if file is not None))
    if options.action == INDEX or options.sheet is None:
        advice.print_next(advice.after_retrieval(config, extraction.spec.pooling))


command = Command("retrieve", run, expansions=SHORT_FORMS, positional="images", options=Retrieve, aliases=ALIASES)
