"""iBOT beside lightly's losses and plain loops; masks; what changes once for each update; the panel of patches."""

import math
from collections import Counter

import pytest
import tiny
import torch
import torch.nn.functional as F
from lightly.loss import DINOLoss, IBOTPatchLoss
from plots import curves

from ssvit.data.augment.crop import CenterCrop
from ssvit.data.batch import Batch
from ssvit.evaluation.panels import collapse_options
from ssvit.evaluation.panels.collapse import PatchCollapse, around
from ssvit.objectives.dino import Dino, Masks, chosen, patch_cross_entropy
from ssvit.options import UserError
from ssvit.schedule import Progress


def values(step: int = 6, steps: int = 12) -> dict[str, torch.Tensor]:
    """The schedules of tiny.ibot at a step."""
    schedules = tiny.ibot().schedules.items()
    return {name: torch.tensor(one(Progress(step, steps)), dtype=torch.float64) for name, one in schedules}


def batch(count: int = 4, seed: int = 0) -> Batch:
    slots = torch.arange(count)
    return Batch(tiny.transform(tiny.ibot())(tiny.pictures(count), slots, seed), None, slots)


def masks(count: int = 4, seed: int = 0) -> Masks:
    return tiny.ibot().sample(torch.arange(count), seed=seed)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_the_patch_loss_is_lightlys_and_that_of_a_plain_loop():
    told, said, center = normal(5, 6, 11), normal(5, 6, 11, seed=1).requires_grad_(), normal(11, seed=2)
    counts = torch.tensor([0, 6, 1, 3, 0])
    objective = tiny.ibot().double()
    objective.patch_center = center
    targets = objective.patch_targets(told, 0.05).exp()
    loss = patch_cross_entropy(targets, (said / 0.1).log_softmax(-1), counts)
    (gradient,) = torch.autograd.grad(loss, said)

    peer = IBOTPatchLoss(output_dim=11, student_temp=0.1).double()
    peer.center.center.copy_(center)
    mask = torch.arange(6) < counts[:, None]
    theirs = peer(told[mask], said[mask], mask.view(5, 2, 3), teacher_temp=0.05)
    torch.testing.assert_close(loss, theirs, rtol=1e-6, atol=0)  # lightly's temperature is in float32
    torch.testing.assert_close(gradient, torch.autograd.grad(theirs, said)[0], rtol=1e-5, atol=1e-9)

    total = 0.0
    for image, count in enumerate(counts.tolist()):
        for patch in range(count):
            sharp = [math.exp((told[image, patch, k] - center[k]) / 0.05) for k in range(11)]
            plain = [math.exp(said.detach()[image, patch, k] / 0.1) for k in range(11)]
            pairs = zip(sharp, plain, strict=True)
            total -= sum(a / sum(sharp) * math.log(b / sum(plain)) for a, b in pairs) / count
    assert loss.item() == pytest.approx(total / 5, rel=1e-12)


def test_the_loss_is_lightlys_two():
    objective, noise, given = tiny.ibot().double(), masks(), batch()
    with torch.no_grad():
        for parameter in objective.teacher.parameters():
            parameter += torch.randn_like(parameter) * 0.1
    objective.center, objective.patch_center = normal(24) * 0.1, normal(24, seed=1) * 0.1
    found = objective(given, noise, values())
    views = [given.views["global"][:, view] for view in range(2)]
    teacher = objective.teacher.module
    heads = [(one.head, one.head if one.patch_head is None else one.patch_head) for one in (teacher, objective)]
    told, said, patches, patch_losses = [], [], [], []
    for view, images in enumerate(views):
        mask = torch.zeros(4, 16, dtype=torch.bool)
        for image, count in enumerate(noise.counts[:, view].tolist()):
            mask[image, noise.ids[image, view, :count]] = True
        outputs = teacher.encoder(images)
        told.append(heads[0][0](teacher.encoder.pool(outputs)))
        patches.append(heads[0][1](outputs[:, 1:]))
        tokens = objective.encoder.embed(images)
        tokens = torch.where(mask[:, :, None], objective.mask_token, tokens)
        outputs = objective.encoder.encode(tokens)
        said.append(heads[1][0](objective.encoder.pool(outputs)))
        peer = IBOTPatchLoss(output_dim=24, student_temp=0.1).double()
        peer.center.center.copy_(objective.patch_center)
        args = patches[-1][mask], heads[1][1](outputs[:, 1:])[mask], mask.view(4, 4, 4)
        patch_losses.append(peer(*args, teacher_temp=values()["patch_temperature"].item()))
    said += [objective.head(objective.encoder.represent(given.views["local"][:, view])) for view in range(2)]
    peer = DINOLoss(output_dim=24, student_temp=0.1).double()
    peer.center = objective.center.view(1, 1, -1).clone()
    view_loss = peer(told, said, teacher_temp=values()["teacher_temperature"].item())
    torch.testing.assert_close(found["view_loss"], view_loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(found["patch_loss"], sum(patch_losses) / 2, rtol=1e-6, atol=0)
    torch.testing.assert_close(found["loss"], found["view_loss"] + found["patch_loss"])
    torch.testing.assert_close(found["patch_teacher_mean"], torch.cat(patches).mean((0, 1)))


def test_without_masks_it_is_dino():
    objective, noise = tiny.ibot(), masks()
    found = objective(batch(), noise._replace(counts=noise.counts * 0), values())
    dino = tiny.dino()
    assert found["loss"].item() == pytest.approx(dino(batch(), (), values())["loss"].item(), rel=1e-6)
    assert found["patch_loss"] == 0
    assert isinstance(objective, Dino)


def test_masks_are_hashed_from_slot_and_view_and_half_of_the_views_have_some():
    objective, slots = tiny.ibot(), torch.arange(2000)
    noise = objective.sample(slots, seed=5)
    assert noise.ids.shape == (2000, 2, 8)
    assert all(len(set(ids)) == 8 for ids in noise.ids[:100].flatten(0, 1).tolist())
    assert all(one[70:90].equal(part) for one, part in zip(noise, objective.sample(slots[70:90], seed=5), strict=True))
    assert not objective.sample(slots, seed=6).ids.equal(noise.ids)
    assert not noise.ids[:, 0].equal(noise.ids[:, 1])
    hidden = noise.counts > 0
    assert abs(hidden.double().mean() - 0.5) < 0.04  # five standard errors
    fractions = noise.counts[hidden] / 16
    assert set(noise.counts[hidden].tolist()) == set(range(2, 9))  # 1.6 to 8 of 16
    assert abs(fractions.mean() - 0.3) < 0.02
    together = (hidden[:, 0] & hidden[:, 1]).double().mean()
    assert abs(together - 0.25) < 0.05


def test_what_is_hidden_changes_no_answer_of_the_student_and_all_of_the_teachers():
    objective = tiny.ibot().eval()
    with torch.no_grad():
        objective.mask_token += 0.5
        images, ids = tiny.pictures(1), torch.randperm(16)[None, :6]
        counts = torch.tensor([4])
        before, told = objective.student_answers(images, ids, counts), objective.teacher_answers(images, ids)
        for place in range(16):
            changed, y, x = images.clone(), place // 4 * 4, place % 4 * 4
            changed[:, :, y : y + 4, x : x + 4] = 255 - changed[:, :, y : y + 4, x : x + 4]
            after = objective.student_answers(changed, ids, counts)
            same = all(one.equal(other) for one, other in zip(before, after, strict=True))
            assert same == (place in ids[0, :4])
            assert not objective.teacher_answers(changed, ids)[1].equal(told[1])
    assert chosen(ids, counts).tolist() == [[True] * 4 + [False] * 2]


def test_the_schedule_freezes_the_prototypes_of_patches_too():
    objective = tiny.ibot()
    frozen = values() | {"last_layer": torch.tensor(0.0, dtype=torch.float64)}
    objective(batch(), masks(), frozen)["loss"].backward()
    for head in (objective.head, objective.patch_head):
        assert not head.prototypes.grad.any()
        assert head.layers[0].weight.grad.any()


def test_forward_changes_nothing_and_after_step_both_centres_and_the_teacher():
    objective = tiny.ibot().double()
    before = {name: value.clone() for name, value in objective.state_dict().items()}
    found = objective(batch(), masks(), values())
    bad = {name: value * math.nan for name, value in found.items()}
    with torch.no_grad():
        for weight in (objective.mask_token, objective.patch_head.prototypes):
            weight += 1
        after = {name: value.clone() for name, value in objective.state_dict().items()}
        objective.after_step(bad, values(), torch.tensor(False))
        assert all(value.equal(after[name]) for name, value in objective.state_dict().items())
        objective.after_step(found, values(), torch.tensor(True))
    torch.testing.assert_close(objective.patch_center, 0.1 * found["patch_teacher_mean"])
    torch.testing.assert_close(objective.center, 0.1 * found["teacher_mean"])
    assert not before["patch_center"].any()
    name = "teacher.module.patch_head.prototypes"
    assert not objective.state_dict()[name].equal(before[name])


def test_views_that_do_not_fit_are_refused_in_one_line():
    with pytest.raises(UserError, match=r"^data\.augment: DINO needs several views"):
        tiny.ibot()(Batch.of(tiny.pictures(2)), masks(2), values())
    given = batch()
    given.views["global"] = given.views["global"][:, :1]
    with pytest.raises(UserError, match=r"^data\.augment: iBOT needs 2 global views of an image, not 1"):
        tiny.ibot()(given, masks(), values())


def panel(**given) -> PatchCollapse:
    return PatchCollapse(
        collapse_options.PatchCollapse(**{"images": 20, "batch_size": 8, **given}),
        source=tiny.source(),
        transform=CenterCrop(size=16),
    )


@torch.no_grad()
def test_the_panel_of_patches_is_what_plain_loops_give():
    objective = tiny.ibot().double().eval()
    objective.patch_center += normal(24) * 0.02
    objective.mask_token += 0.3
    metrics = panel()(objective).metrics
    told, said, features, places = [], [], [], []
    for images, slots in panel().batches:
        for image, ids in zip(images, objective.sample(slots, seed=0).ids[:, 0], strict=True):
            tokens = objective.teacher.module.encoder(image[None])[0, 1:]
            places += ids.tolist()
            features += [F.normalize(tokens[patch].float(), dim=0).double() for patch in ids]
            cosines = objective.teacher.module.head(tokens[ids])
            told += [((one - objective.patch_center) / 0.08).softmax(0) for one in cosines]
            embedded = objective.encoder.embed(image[None])
            embedded[0, ids] = objective.mask_token
            said += [(one / 0.1).softmax(0) for one in objective.head(objective.encoder.encode(embedded)[0, 1:][ids])]
    told, said, features = map(torch.stack, (told, said, features))
    assert len(told) == 160
    single = -(told * told.log()).sum(1).mean().item()
    mean = -(told.mean(0) * told.mean(0).log()).sum().item()
    cosine = (features @ features.T).sum() - 160
    expected = {
        "entropy_of_mean": mean,
        "entropy": single,
        "entropy_uniform": math.log(24),
        "told": mean - single,
        "told_at_most": math.log(24),
        "prototypes_chosen": len(set(told.argmax(1).tolist())),
        "feature_std": features.var(0, correction=0).sum().sqrt().item(),
        "feature_cosine": cosine.item() / (160 * 159),
        "agreement": (told.argmax(1) == said.argmax(1)).double().mean().item(),
        "agreement_by_chance": (told.mean(0) * said.mean(0)).sum().item(),
    }
    pairs = Counter(zip(places, told.argmax(1).tolist(), strict=True))
    most = [max(count for (at, _), count in pairs.items() if at == place) for place in set(places)]
    expected["agreement_by_place"] = sum(most) / 160
    found = {name.removeprefix("patch_"): value for name, value in metrics.items() if name.startswith("patch_")}
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)


@torch.no_grad()
def test_the_panel_draws_images_and_patches():
    objective = tiny.ibot().eval()
    first = panel()(objective).metrics
    found = panel()(objective, [{"step": 0, **first}, {"step": 5}])
    assert set(found.figures) == {"collapse", "prototypes", "patch_collapse", "patch_prototypes"}
    for prefix, what in (("", "images"), ("patch_", "masked patches")):
        lines = curves(found.figures[f"{prefix}collapse"])
        assert lines[f"difference: told of the {what}"] == [first[f"{prefix}told"]] * 2
        assert any(f"of the {what}" in line for line in found.lines)
    assert "masked patches" in found.figures["patch_prototypes"].title


def test_a_window_shows_a_patch_and_its_neighbours():
    images = tiny.pictures(2)
    windows = around(images, (4, 4))
    assert windows.shape == (2, 16, 3, 12, 12)
    assert windows.dtype == torch.uint8
    assert windows[:, 5].equal(images[:, :, :12, :12])
    assert windows[:, 0, :, 4:, 4:].equal(images[:, :, :8, :8])
    assert windows[:, 0, :, :5, 4:].eq(images[:, :, :1, :8]).all()
