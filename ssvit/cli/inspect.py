"""Compare the inductive biases of encoders, and the similarity of their layers.

Usage: ssvit inspect checkpoint=PATH against=[small,resnet10t].
"""

from dataclasses import asdict
from pathlib import Path

from ssvit.analysis.options import Inspect
from ssvit.config.command import Command
from ssvit.config.composed import Config
from ssvit.config.declaration import Run
from ssvit.data.sources.base_options import SHORT_FORMS
from ssvit.loading.encoder_options import LoadEncoder
from ssvit.loading.pretrained import add_placeholders, select_checkpoint
from ssvit.models.encoder_options import ALIASES
from ssvit.options import aligned, print_lines, within


def run(config: Config) -> None:
    """Print a table of the encoders, and write it with the figures; unreadable images are reported and skipped."""
    options: Inspect = config.options
    Run(options).check()
    for name, encoder in options.against.items():
        if isinstance(encoder, LoadEncoder):
            with within(f"against.{name}"):
                encoder.loaded()
    if isinstance(options.encoder, LoadEncoder):
        checkpoint = options.encoder.checkpoint()
        first, home = checkpoint.name, checkpoint.home(options.outputs)
    else:
        first, home = getattr(options.encoder, "model", config.choices["encoder"]), Path(options.outputs)
    config.line.announce()

    import torch

    from ssvit.analysis import bias, similarity
    from ssvit.analysis.inside import Report, read_pictures
    from ssvit.models.encoder import frozen
    from ssvit.randomness import key

    device = "cuda" if options.device == "auto" and torch.cuda.is_available() else "cpu"
    encoders = {}
    for part in ("encoder", *(f"against.{name}" for name in options.against)):
        torch.manual_seed(key(options.seed, "weights"))
        name = first if part == "encoder" else part.removeprefix("against.")
        encoders[name if name not in encoders else f"{name}_2"] = frozen(config.build(part).to(device))
    data, view = config.build("data.source"), config.build("data.view")
    train, pictures = (
        read_pictures(
            source, view, count, batch_size=options.batch_size, workers=options.workers, timeout=options.loader_timeout
        )
        for source, count in ((data.train, options.train_images), (data.watched, options.count))
    )
    sizes = {"patch_size": options.patch_size, "batch_size": options.batch_size}
    biases = {
        name: bias.measure(encoder, train, pictures, **sizes, seed=options.seed) for name, encoder in encoders.items()
    }
    layers = {name: len(of_encoder.receptive_field) for name, of_encoder in biases.items()}
    values = similarity.cka([*encoders.values()], pictures.images, options.batch_size)
    uniform = bias.extent(torch.ones(pictures.images.shape[2:]))
    numbers = {"images": len(pictures.images), "train_images": len(train.images), "patch_size": options.patch_size}
    report = Report(
        {"biases": bias.plot(biases, uniform), "similarity": similarity.plot(values, layers)},
        {
            **numbers,
            "uniform_receptive_field": uniform,
            "encoders": {name: asdict(of_encoder) for name, of_encoder in biases.items()},
            "similarity": {"layers": layers, "cka": values.tolist()},
        },
        aligned(bias.table(biases)),
    )
    written = report.save(Path(options.output or home / "inspect"))
    print_lines(*report.lines, *(f"written: {file}" for file in written))


command = Command(
    "inspect",
    run,
    expansions={**SHORT_FORMS, "against": "ssvit.analysis.options.add_encoders"},
    before=select_checkpoint,
    stand_in=add_placeholders,
    options=Inspect,
    aliases=ALIASES,
)
