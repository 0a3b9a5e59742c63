"""Find similar pictures: ssvit retrieve action=index|add|query store=FOLDER PICTURES…|data=SET"""

from functools import partial

from ssvit.cli import describer
from ssvit.cli.launch import Tool
from ssvit.config.composed import Config
from ssvit.config.declaration import Run, select
from ssvit.evaluation.base_options import AUTO
from ssvit.options import print_lines
from ssvit.retrieval.options import ADD, FEWEST, INDEX, Retrieve
from ssvit.retrieval.options import pictures as named_pictures


def run(config: Config) -> None:
    """Make a store of pictures, add to it, or query it; files that cannot be read are named and left out."""
    plain = config.values
    own = select(Retrieve, plain)
    Run.of(plain)
    of_a_set = plain["data"] is not None
    pictures = named_pictures(plain["images"]) if plain["images"] or not of_a_set else {}
    checkpoint, of_checkpoint, pixels = describer.check(config, store=None if own.action == INDEX else own.store)

    from ssvit.data.decode import load
    from ssvit.retrieval import gallery

    kind = config.build("index")
    read: gallery.Load = partial(load, pixels=pixels)
    if of_a_set:
        called = config.choices["data"]
        data = describer.data_set(config, pixels)
        split, read = gallery.of_data_set(called, data, own.split, read)
        pictures = pictures or split
    describe = of_checkpoint(load=read, batch_size=own.batch_size, workers=own.workers)
    if own.action in (INDEX, ADD):
        standardize = own.standardize
        if standardize == AUTO:
            standardize = len(pictures) >= FEWEST and describer.needs_standardizing(checkpoint, config.line)
        write = partial(gallery.index, standardize=standardize) if own.action == INDEX else gallery.add
        report = write(own.store, pictures, describe)
    else:
        answer = gallery.query(own.store, pictures, describe, kind, own.k)
        answer.write(sheet=own.sheet, output=own.output)
        report = answer.report(ranking=own.ranking)
    config.line.announce()
    print_lines(*report.split("\n"), describe.report)


tool = Tool("retrieve", "find pictures that look alike", run, positional="images", options=Retrieve)
