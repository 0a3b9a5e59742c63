"""Find similar images.

Usage: ssvit retrieve action=index|add|query store=FOLDER IMAGES…|data=SET.
"""

from functools import partial

from ssvit.config.command import Command
from ssvit.config.composed import Config
from ssvit.data.sources.base_options import SHORT_FORMS
from ssvit.evaluation.features_options import AUTO
from ssvit.options import print_lines
from ssvit.retrieval import describer
from ssvit.retrieval.options import ADD, FEWEST, INDEX, Retrieve
from ssvit.retrieval.options import pictures as named_pictures


def run(config: Config) -> None:
    """Create a store of images, add to it, or query it; unreadable files are reported and skipped."""
    options: Retrieve = config.options
    of_a_set = options.data is not None
    pictures = named_pictures(options.images) if options.images or not of_a_set else {}
    checkpoint, of_checkpoint, pixels = describer.check(
        config, store=None if options.action == INDEX else options.store
    )

    from ssvit.data.decode import load
    from ssvit.retrieval import gallery

    kind = config.build("index")
    read: gallery.Load = partial(load, pixels=pixels)
    if of_a_set:
        called = config.choices["data"]
        data = describer.data_set(config, pixels)
        split, read = gallery.of_data_set(called, data, options.split, read)
        pictures = pictures or split
    describe = of_checkpoint(load=read, batch_size=options.batch_size, workers=options.workers)
    if options.action in (INDEX, ADD):
        standardize = options.standardize
        if standardize == AUTO:
            standardize = len(pictures) >= FEWEST and describer.needs_standardizing(checkpoint, config.line)
        write = partial(gallery.index, standardize=standardize) if options.action == INDEX else gallery.add
        report = write(options.store, pictures, describe)
    else:
        answer = gallery.query(options.store, pictures, describe, kind, options.k)
        answer.write(sheet=options.sheet, output=options.output)
        report = answer.report(ranking=options.ranking)
    config.line.announce()
    print_lines(*report.split("\n"), describe.report)


command = Command("retrieve", run, expansions=SHORT_FORMS, positional="images", options=Retrieve)
