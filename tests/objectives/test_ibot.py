"""iBOT equals lightly's losses and plain loops: masks, buffers that change once per update, evaluation of patches."""

import pytest
import tiny
import torch
from lightly.loss import DINOLoss, IBOTPatchLoss

from ssvit.data.batch import Batch
from ssvit.objectives.dino import Masks


def values() -> dict[str, torch.Tensor]:
    return tiny.scheduled(tiny.ibot())


def batch() -> Batch:
    return tiny.views(tiny.ibot())


def masks() -> Masks:
    return tiny.ibot().sample(torch.arange(4), seed=0)


def test_the_loss_is_lightlys_two():
    objective, noise, given = tiny.ibot().double(), masks(), batch()
    teacher, encoder, head = objective.teacher.module, objective.encoder, objective.head
    tiny.shaken(objective.teacher)
    objective.center, objective.patch_center = tiny.noise(24).double() * 0.1, tiny.noise(24, seed=1).double() * 0.1
    result = objective(given, noise, values())
    targets, predictions, patches, patch_losses = [], [], [], []
    for view, images in enumerate(given.views["global"].unbind(1)):
        mask = torch.zeros(4, 16, dtype=torch.bool)
        for image, count in enumerate(noise.counts[:, view].tolist()):
            mask[image, noise.ids[image, view, :count]] = True
        outputs = teacher.encoder(images)
        targets.append(teacher.head(teacher.encoder.pool(outputs)))
        patches.append(teacher.head(outputs[:, 1:]))
        outputs = encoder.encode(torch.where(mask[:, :, None], objective.mask_token, encoder.embed(images)))
        predictions.append(head(encoder.pool(outputs)))
        peer = IBOTPatchLoss(output_dim=24, student_temp=0.1).double()
        peer.center.center.copy_(objective.patch_center)
        arguments = patches[-1][mask], head(outputs[:, 1:])[mask], mask.view(4, 4, 4)
        patch_losses.append(peer(*arguments, teacher_temp=values()["patch_temperature"].item()))
    predictions += [head(encoder.represent(images)) for images in given.views["local"].unbind(1)]
    peer = DINOLoss(output_dim=24, student_temp=0.1).double()
    peer.center = objective.center.view(1, 1, -1).clone()
    view_loss = peer(targets, predictions, teacher_temp=values()["teacher_temperature"].item())
    torch.testing.assert_close(result["view_loss"], view_loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(result["patch_loss"], sum(patch_losses) / 2, rtol=1e-6, atol=0)
    torch.testing.assert_close(result["loss"], result["view_loss"] + result["patch_loss"])
    torch.testing.assert_close(result["patch_teacher_mean"], torch.cat(patches).mean((0, 1)))


def test_without_masks_it_is_dino():
    noise = masks()
    result = tiny.ibot()(batch(), noise._replace(counts=noise.counts * 0), values())
    assert result["loss"].item() == pytest.approx(tiny.dino()(batch(), (), values())["loss"].item(), rel=1e-6)
    assert result["patch_loss"] == 0


def test_half_of_the_views_have_masks_of_the_fraction():
    noise = tiny.ibot().sample(torch.arange(2000), seed=5)
    assert noise.ids.shape == (2000, 2, 8)
    assert all(len(set(ids)) == 8 for ids in noise.ids[:100].flatten(0, 1).tolist())
    masked = noise.counts > 0
    assert abs(masked.double().mean() - 0.5) < 0.04  # five standard errors
    assert abs((masked[:, 0] & masked[:, 1]).double().mean() - 0.25) < 0.05
    assert set(noise.counts[masked].tolist()) == set(range(2, 9))  # 1.6 to 8 of 16
    assert abs((noise.counts[masked] / 16).mean() - 0.3) < 0.02


@torch.no_grad()
def test_only_the_first_ids_are_masked_and_the_teacher_encodes_all_patches():
    objective, images = tiny.ibot().eval(), tiny.pictures(1)
    objective.mask_token += 0.5
    ids, counts = torch.randperm(16)[None, :6], torch.tensor([4])
    student, teacher = objective.student_logits(images, ids, counts), objective.teacher_logits(images, ids)
    for place in range(16):
        changed = tiny.inverted(images, place)
        same = map(torch.equal, student, objective.student_logits(changed, ids, counts))
        assert all(same) == (place in ids[0, :4])
        assert not objective.teacher_logits(changed, ids)[1].equal(teacher[1])


def test_after_step_updates_both_centres():
    objective = tiny.ibot().double()
    result = {name: value.detach() for name, value in objective(batch(), masks(), values()).items()}
    objective.after_step(result, values(), torch.tensor(True))
    torch.testing.assert_close(objective.patch_center, 0.1 * result["patch_teacher_mean"])
    torch.testing.assert_close(objective.center, 0.1 * result["teacher_mean"])
