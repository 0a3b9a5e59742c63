"""A teacher of a run with another pixel range than the images sees the values on which it was trained."""

import exported
import pytest
import torch
from images import put_grey

from ssvit.checkpoints import storage
from ssvit.cli import find_command
from ssvit.loading.encoder import load_classifier, load_encoder
from ssvit.loading.options import LoadClassifier, LoadEncoder, LoadTeacher
from ssvit.objectives.classify import Classify
from ssvit.objectives.classify_options import Classify as ClassifyOptions

RANGES = {None: (0, 255), "one": ([0], [4000]), "each": ([100, 0, 50], [1000, 2000, 4000])}


@pytest.fixture(scope="module", params=[None, "each"])
def trained(request, tmp_path_factory):
    """A checkpoint of a classifier of three channels, and the ends of its pixel range, (3, 1, 1)."""
    folder, ends = tmp_path_factory.mktemp("teacher"), RANGES[request.param]
    encoder = exported.encoder(mean=[0.4, 0.5, 0.3], std=[0.2, 0.3, 0.1])
    classifier = Classify(ClassifyOptions(classes=["a", "b", "c"]), encoder=encoder)
    torch.nn.init.normal_(classifier.head.weight, generator=torch.Generator().manual_seed(0))
    metadata = {"encoder": encoder.arguments, "stage": "finetune", "range": request.param and ends}
    storage.save(folder, 1, {"model": classifier.state_dict()}, metadata | classifier.metadata)
    return folder, [torch.tensor(end).expand(3)[:, None, None] for end in ends]


@pytest.mark.parametrize("name", RANGES)
@torch.no_grad()
def test_the_teacher_sees_the_values_of_its_training(trained, name):
    folder, (low, high) = trained
    encoder = load_encoder(LoadEncoder(path=folder))
    generator = torch.Generator().manual_seed(0)
    values = 100 + 155 * torch.rand(2, 3, *encoder.image_size, generator=generator)  # within all ranges
    new_low, new_high = (torch.tensor(end).expand(3)[:, None, None] for end in RANGES[name])
    images, own = (values - new_low) / (new_high - new_low), (values - low) / (high - low)
    limits = None if name is None else RANGES[name]
    teacher = LoadTeacher(path=folder, range=limits).build()
    torch.testing.assert_close(teacher.represent(images), encoder.represent(own), rtol=1e-3, atol=1e-4)
    classifier, reference = LoadClassifier(path=folder, range=limits).build(), load_classifier(LoadEncoder(path=folder))
    torch.testing.assert_close(classifier.logits(images), reference.logits(own), rtol=1e-3, atol=1e-4)


def test_teachers_get_the_range_of_the_images(trained, tmp_path):
    folder, _ = trained
    put_grey(tmp_path / "set" / "a.png", 100)
    command = find_command("pretrain")
    for options in (["objective=distill"], ["objective=supervised", "distillation=deit"]):
        typed = [*options, f"teacher={folder}", "data=folder", f"data.root={tmp_path}/set", f"outputs={tmp_path}"]
        for limits, expected in (
            ([], None),
            (["data.range=[0,4000]"], [0, 4000]),
            (["data.range=[[0,1,2],[7,8,9]]"], [[0, 1, 2], [7, 8, 9]]),
        ):
            config = command.compose(command.line([*typed, *limits]))
            objective = config.options.objective
            teacher = objective.teacher if options == ["objective=distill"] else objective.distillation.teacher
            assert (teacher.range and list(teacher.range)) == expected
