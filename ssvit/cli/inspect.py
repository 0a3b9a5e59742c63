"""Compare the inductive biases of encoders, and the similarity of their layers.

Usage: ssvit inspect checkpoint=PATH against=[small,resnet10t].
"""

from dataclasses import asdict

from ssvit.analysis.options import Inspect
from ssvit.config.command import Command
from ssvit.config.composed import Config
from ssvit.config.declaration import Tree
from ssvit.data.sources.base_options import SHORT_FORMS
from ssvit.errors import aligned, print_lines, within
from ssvit.loading.options import LoadEncoder
from ssvit.loading.pretrained import add_placeholders, select_checkpoint


def run(config: Config) -> None:
    """Print a table of the encoders, and write it with the figures; unreadable images are reported and skipped."""
    options: Inspect = config.options
    Tree(options).check()
    for name, encoder in options.against.items():
        if isinstance(encoder, LoadEncoder):
            with within(f"against.{name}"):
                encoder.loaded()
    first = getattr(options.encoder, "model", config.choices["encoder"])
    if isinstance(options.encoder, LoadEncoder):
        first = options.encoder.checkpoint().name
    parts = {f"{first} (encoder)" if first in options.against else first: "encoder"}
    parts |= {name: f"against.{name}" for name in options.against}
    config.line.announce()

    import torch

    from ssvit.analysis import bias, similarity
    from ssvit.analysis.inside import Report, device_of, read_pictures
    from ssvit.engine.progress import progress
    from ssvit.engine.randomness import key
    from ssvit.models.encoder import frozen

    device = device_of(options.device)
    data, view = options.build_part("data"), options.build_part("data.view")
    train = read_pictures(data.train, view, options.train_images, **options.reading)
    pictures = read_pictures(data.validation_or_test, view, options.count, **options.reading)
    encoders, biases = {}, {}
    sizes = {"patch_size": options.patch_size, "batch_size": options.batch_size}
    for name, part in parts.items():
        torch.manual_seed(key(options.seed, "weights"))
        encoders[name] = frozen(options.build_part(part).to(device))
        show = progress(name, " images")
        biases[name] = bias.measure(encoders[name], train, pictures, **sizes, seed=options.seed, progress=show)
    values = similarity.cka([*encoders.values()], pictures.images, options.batch_size)
    layers = {name: len(of_encoder.receptive_field) for name, of_encoder in biases.items()}
    uniform = bias.extent(torch.ones(pictures.images.shape[2:]))
    report = Report(
        {"biases": bias.plot(biases, uniform), "similarity": similarity.plot(values, layers)},
        {
            **sizes, "images": len(pictures.images), "train_images": len(train.images), "uniform": uniform,
            "encoders": {name: asdict(of_encoder) for name, of_encoder in biases.items()},
            "layers": layers, "cka": values.tolist(),
        },
        aligned(bias.bias_table(biases)),
    )  # fmt: skip
    written = report.save(options.folder)
    print_lines(*report.lines, *(f"written: {file}" for file in written))


command = Command(
    "inspect",
    run,
    expansions={**SHORT_FORMS, "against": "ssvit.analysis.options.add_encoders"},
    before=select_checkpoint,
    stand_in=add_placeholders,
    options=Inspect,
)
