"""The contract of every objective: one graph, exact resumption, equality over processes, hashed randomness."""

import copy
import itertools
import json
import math

import pytest
import tiny
import torch
from command import error_of, tiny_options
from PIL import Image
from runs import final, rows, states, train_in_processes

from ssvit.checkpoints import storage
from ssvit.checkpoints.checkpoint import Checkpoint
from ssvit.data.batch import Batch, masks_of_views, named
from ssvit.errors import UserError
from ssvit.kernels.accelerate import accelerate
from ssvit.models.timm_options import options_from
from ssvit.models.vit_options import ViT
from ssvit.objectives import (
    classify_options,
    codebook_options,
    continuation_options,
    contrastive_options,
    diet_options,
    dino_options,
    distill_options,
    latent_options,
    mae_options,
    masked_patch_options,
    segment_options,
    targets_options,
)
from ssvit.objectives.base import Objective
from ssvit.objectives.classify import Classify
from ssvit.objectives.codebook import Codebook
from ssvit.objectives.continuation import Continuation
from ssvit.objectives.dino import Dino
from ssvit.objectives.distill import Distill
from ssvit.objectives.segment import Segment
from ssvit.training import loop

# By the name of a function of tiny.py, and its arguments.
CASES = {
    "masked_patch": ("model", {}),
    "masked_patch_decoder": ("masked_patch_decoder", {}),
    "simmim": ("simmim", {}),
    "hog": ("hog", {}),
    "codebook": ("codebook", {}),
    "codebook_of_features": ("codebook", {"features": True}),
    "mae": ("mae", {}),
    "mae_with_stochastic_depth": ("mae_with_stochastic_depth", {}),
    "dino": ("dino", {}),
    "ibot": ("ibot", {}),
    "latent": ("latent", {}),
    "simclr": ("simclr", {}),
    "simclr_of_all_patches": ("simclr", {"keep": 1.0}),
    "contrastive_tuning": ("contrastive_tuning", {}),
    "continuation_with_lora": (
        "continuation",
        {"trained": 1, "lora": {"rank": 2, "alpha": 3.0, "matrices": "query_value"}, "anchor": {}},
    ),
    "continuation_of_dino_with_lora": (
        "continuation",
        {"of": "dino", "trained": 0, "lora": {"rank": 2, "alpha": 3.0}, "anchor": {"kind": "gram"}},
    ),
    "continuation_of_dino": ("continuation", {"of": "dino"}),
    "diet": ("diet", {}),
    "diet_normalized": ("diet", {"normalize": True}),
    "distill": ("distill", {}),
    "distill_of_mixtures": ("distill", {"mixup": True, "hidden": 8, "loss": "smooth_l1"}),
    "distill_cached": ("distill", {"features": "pooled", "cached": True}),
    "classify": ("classify", {}),
    "classify_head": ("classify", {"trained": "head"}),
    "classify_layer": ("classify", {"trained": 1}),
    "classify_lora": ("classify", {"trained": "head", "lora": {"rank": 2, "alpha": 3.0}}),
    "segment": ("segment", {"class_weights": [1.0, 0.5, 2.0]}),
    "segment_maps_lora": ("segment", {"head": "maps", "trained": "head", "lora": {"rank": 2, "alpha": 3.0}}),
}
EVERY = pytest.mark.parametrize("case", CASES)
# Cases whose code other cases run too, or tests/training/test_training.py: what takes long is tested with them by
# `make test-slow`.
REPEATED = ("masked_patch", "masked_patch_decoder", "simmim", "codebook", "mae_with_stochastic_depth",
            "simclr_of_all_patches", "continuation_of_dino", "continuation_with_lora", "dino", "hog", "diet", "distill",
            "classify_head", "classify_layer")  # fmt: skip
MOSTLY = pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * (case in REPEATED)) for case in CASES]
)
# Cases that use the class tokens in different ways.
SEVERAL_TOKENS = ("masked_patch", "mae", "latent", "ibot", "simclr", "distill", "classify", "segment")
SAMPLING = ("masked_patch", "masked_patch_decoder", "simmim", "mae", "ibot", "latent", "simclr")


def build(case: str, dropout: float = 0.0, seed: int = 0, depth: float = 0.0) -> Objective:
    """An objective; depth: the rate of stochastic depth of its encoder's last layer."""
    name, options = CASES[case]
    objective = getattr(tiny, name)(dropout, seed, **options)
    if depth:
        for number, block in enumerate(objective.encoder.blocks):
            block.drop.rate = depth * number / (len(objective.encoder.blocks) - 1)
    if isinstance(getattr(objective, "target", None), Codebook):
        objective.prepare(Batch.of_view(tiny.pictures(20)) for _ in itertools.count())
    if isinstance(objective, Distill):
        given = Batch.of_view(tiny.pictures(24), slots=torch.arange(24))._replace(indices=torch.arange(24))
        objective.prepare(itertools.repeat(given))
    return objective


def shaken(objective: Objective) -> Objective:
    """Return the objective with random weights, so that no head is zero."""
    torch.manual_seed(1)
    return tiny.shaken(objective)


def batch(objective: Objective, count: int = 6, first: int = 0) -> Batch:
    slots = torch.arange(first, first + count)
    views = named(tiny.transform(objective)(tiny.pictures(first + count)[first:], slots, 0))
    targets = None
    if isinstance(objective, Segment):
        masks = tiny.masks(first + count)[first:]
        targets = {"masks": masks_of_views(masks, tiny.transform(objective), slots, 0)}
    return Batch(views, slots % 3 if isinstance(objective, Classify) else None, slots, targets, indices=slots)


def part(given: Batch, rows_: slice | torch.Tensor) -> Batch:
    views = {name: view[rows_] for name, view in given.views.items()}
    labels = None if given.labels is None else given.labels[rows_]
    targets = given.targets and {name: target[rows_] for name, target in given.targets.items()}
    return given._replace(
        views=views, labels=labels, slots=given.slots[rows_], targets=targets, indices=given.indices[rows_]
    )


def run(objective, given: Batch, step: int = 6) -> dict[str, torch.Tensor]:
    noise = objective.sample(given.slots, seed=given.seed)
    return objective(given, noise, tiny.scheduled(objective, step))


def unchanged(objective: Objective, before: dict[str, torch.Tensor]) -> bool:
    return all(value.equal(before[name]) for name, value in objective.state_dict().items())


@pytest.fixture
def graphs(monkeypatch):
    """Return the number of compiled graphs so far; a graph break is an error."""
    found, compile = [], torch.compile

    def count(graph, inputs):
        found.append(graph)
        return graph.forward

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", lambda model, **_: compile(model, backend=count, fullgraph=True))
    yield found
    torch._dynamo.reset()


TWO_LAYERS = ("latent", "contrastive_tuning", "classify_layer", "continuation_with_lora", "mae_with_stochastic_depth")


# Tracing takes long, and longest for two students and teachers.
GRAPHS = ("masked_patch", "codebook_of_features", "mae", "ibot", "latent", "simclr", "contrastive_tuning",
          "continuation_with_lora", "distill_of_mixtures")  # fmt: skip


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * (case not in GRAPHS)) for case in CASES]
)
def test_a_run_is_one_graph_and_one_that_samples(tmp_path, graphs, case, monkeypatch):
    """One graph suffices with schedules that change at every step, micro-batches, an average and a checkpoint."""
    if case not in TWO_LAYERS:  # tracing takes most of the time
        shape = {"image_size": 16, "patch_size": 4, "width": 16, "depth": 1, "heads": 2}
        monkeypatch.setattr(tiny, "encoder", lambda rate: ViT(**shape, dropout=rate, stochastic_depth=rate).build())
    for backend in ("compile", "eager"):
        options = {"backend": backend, "accumulate": 2, "steps": 4, "warmup": 1}
        name, arguments = CASES[case]
        _, objective = tiny.train(tmp_path / backend, objective=getattr(tiny, name)(0.1, **arguments), **options)
    assert len(graphs) == (2 if objective.sample(torch.arange(2), seed=0) else 1)
    assert rows(tmp_path / "compile", "train/loss") == pytest.approx(rows(tmp_path / "eager", "train/loss"), rel=1e-3)


@MOSTLY
def test_a_run_interrupted_anywhere_ends_with_the_same_bits(case, tmp_path):
    facts = build(case).metadata
    options = {"accumulate": 2, "steps": 6, "weight_decay": 0.1, "layer_decay": 0.7, "facts": facts}
    start = copy.deepcopy(build(case, 0.2).state_dict())
    _, objective = tiny.train(tmp_path / "whole", objective=build(case, 0.2), **options)
    with pytest.raises(tiny.Interrupted):  # in the middle of a step
        tiny.train(tmp_path / "broken", objective=tiny.interrupted(build(case, 0.2), 9), **options)
    tiny.train(tmp_path / "broken", objective=build(case, 0.2), **options)
    assert set(final(tmp_path / "whole")) == {"model.safetensors", "ema.safetensors", "optimizer.safetensors"}
    assert final(tmp_path / "broken") == final(tmp_path / "whole")
    assert rows(tmp_path / "broken", "train/loss") == rows(tmp_path / "whole", "train/loss")
    saved = states(tmp_path / "whole")
    assert unchanged(objective, saved["model"])
    assert saved["model"].keys() == objective.state_dict().keys() == saved["ema"].keys()
    assert {name.rpartition("/")[0] for name in saved["optimizer"]} == tiny.trained(objective)
    frozen = {name for name, parameter in objective.named_parameters() if not parameter.requires_grad}
    for name in frozen if not hasattr(objective.measured(), "teacher") else ():
        assert saved["model"][name].equal(start[name]), name
        assert saved["ema"][name].equal(start[name]), name
    encoder = tiny.loaded(tmp_path / "whole")
    assert encoder(tiny.pictures(3)).shape == (3, 17, 16)


SHARDED = ("ibot", "contrastive_tuning", "classify_lora")


@pytest.mark.parametrize(
    ("case", "strategy"),
    [pytest.param(case, strategy, marks=[pytest.mark.slow] * (case in slow))
     for case in ("mae_with_stochastic_depth", "codebook", "codebook_of_features", "dino", "ibot", "latent", "simclr",
                  "contrastive_tuning", "diet", "distill", "distill_cached", "classify_layer", "classify_lora",
                  "segment", "continuation_with_lora", "continuation_of_dino_with_lora")
     for strategy, slow in (("ddp", REPEATED), ("fsdp", set(CASES) - set(SHARDED)))],
)  # fmt: skip
def test_two_processes_train_as_one_does(case, strategy, tmp_path):
    """test_training.py covers objectives without buffers."""
    options = {"steps": 5, "ema": 0.5, "double": True, "weight_decay": 0.1}
    name, arguments = CASES[case]
    tiny.train(tmp_path / "one", objective=getattr(tiny, name)(**arguments), **options)
    assert train_in_processes(tmp_path / "two", 2, strategy=strategy, objective=CASES[case], **options) == [0, 0]
    # A sharded model has buffers, and so the queue of contrastive tuning, in float32.
    least = 1e-6 if case == "contrastive_tuning" else 1e-8
    torch.testing.assert_close(states(tmp_path / "two"), states(tmp_path / "one"), rtol=1e-6, atol=least)


@pytest.mark.parametrize(("case", "tokens"), [*((case, 1) for case in CASES), *((case, 3) for case in SEVERAL_TOKENS)])
def test_gradients_reach_all_that_is_trained_and_are_those_of_float64(case, tokens, monkeypatch):
    """Several class tokens are trained as one is."""
    options = {"image_size": 16, "patch_size": 4, "width": 16, "depth": 2, "heads": 2, "class_tokens": tokens}
    monkeypatch.setattr(tiny, "encoder", lambda rate: ViT(**options, dropout=rate).build())
    objective = shaken(build(case))
    double = copy.deepcopy(objective).double()
    losses = [run(model, batch(objective))["loss"] for model in (objective, double)]
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-4)
    for loss in losses:
        loss.backward()
    reached = {name for name, one in objective.named_parameters() if one.grad is not None and one.grad.abs().max() > 0}
    # The positions of the class token alone, where patches are pooled, and its query in the last layer have none.
    assert reached == tiny.trained(objective)
    for (name, one), exact in zip(objective.named_parameters(), double.parameters(), strict=True):
        if one.grad is not None:
            torch.testing.assert_close(one.grad.double(), exact.grad, rtol=5e-3, atol=5e-4, msg=name)
    groups = objective.parameter_groups(weight_decay=0.1, layer_decay=0.5)
    named_ = {id(parameter): name for name, parameter in objective.named_parameters()}
    found = {named_[id(one)]: group["decays"] for group in groups for one in group["params"]}
    assert found.keys() == tiny.trained(objective)
    assert sum(len(group["params"]) for group in groups) == len(found)
    free = ("token", "positions", "relative")
    for name, decays in found.items():
        assert decays == (objective.get_parameter(name).ndim >= 2 and not any(word in name for word in free)), name


@pytest.mark.parametrize("accelerated", [False, True])
@EVERY
def test_under_autocast_the_loss_and_its_gradient_are_near_those_of_float32(case, accelerated, monkeypatch):
    """Computed by torch or, where the processor has them, by the kernels, whose widths are multiples of 16."""
    shape = {"image_size": 16, "patch_size": 4, "width": 32, "depth": 2, "heads": 2}
    monkeypatch.setattr(tiny, "encoder", lambda rate: ViT(**shape, dropout=rate, stochastic_depth=rate).build())
    plain = shaken(build(case))
    model, given = copy.deepcopy(plain), batch(plain)
    if accelerated:
        accelerate(model)
    exact = run(plain, given)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = run(model, given)
    for name, value in rounded.items():
        assert value.dtype == exact[name].dtype, name
    assert rounded["loss"].item() == pytest.approx(exact["loss"].item(), rel=0.1)
    gradients = []
    for objective, result in ((plain, exact), (model, rounded)):
        parameters = [parameter for parameter in objective.parameters() if parameter.requires_grad]
        gradients.append(torch.cat([one.flatten() for one in torch.autograd.grad(result["loss"], parameters)]))
    assert torch.nn.functional.cosine_similarity(*gradients, dim=0) > 0.9


@pytest.mark.parametrize("case", ["codebook", "ibot", "contrastive_tuning", "continuation_of_dino_with_lora"])
def test_a_skipped_step_changes_nothing(case, tmp_path):
    """Weights, average, moments, teacher, centre, queue and statistics; the next step changes all of these states."""
    tiny.train(tmp_path, objective=tiny.at(build(case), 2, act=tiny.not_finite), steps=4, warmup=1, save_every=1)
    before, bad, after = (states(tmp_path / f"step_{step:08d}") for step in (2, 3, 4))
    for kind, state in before.items():
        assert all(value.equal(bad[kind][name]) for name, value in state.items()), kind
        assert not all(value.equal(after[kind][name]) for name, value in state.items()), kind


@EVERY
def test_forward_and_a_step_that_is_not_applied_change_nothing(case):
    objective = shaken(build(case))
    before = {name: value.clone() for name, value in objective.state_dict().items()}
    result = run(objective, batch(objective))
    assert unchanged(objective, before)
    outputs = {name: value.detach() for name, value in result.items() if value.ndim}
    with torch.no_grad():
        bad = {name: value * math.nan for name, value in outputs.items()}
        objective.after_step(bad, tiny.scheduled(objective), torch.tensor(False))
        assert unchanged(objective, before)
        objective.after_step(outputs, tiny.scheduled(objective), torch.tensor(True))
    weights = tiny.trained(objective)
    assert all(value.equal(before[name]) for name, value in objective.state_dict().items() if name in weights)


@pytest.mark.parametrize(
    "case",
    [
        case
        for case in CASES
        if case.partition("_")[0] not in ("simclr", "contrastive") and case != "distill_of_mixtures"
    ],
)
def test_micro_batches_add_up_to_the_batch(case):
    """Gradients and buffers that change once per update, such as a centre or a teacher, agree with stochastic depth."""
    objective = shaken(build(case, depth=0.6)).double()
    parameters = [parameter for parameter in objective.parameters() if parameter.requires_grad]
    given = batch(objective)
    whole = torch.autograd.grad(run(objective, given)["loss"], parameters)
    order = torch.tensor([5, 2, 0, 3, 1, 4])
    parts = [torch.autograd.grad(run(objective, part(given, rows_))["loss"], parameters) for rows_ in order.split(2)]
    torch.testing.assert_close(tuple(sum(one) / 3 for one in zip(*parts, strict=True)), whole, rtol=1e-6, atol=1e-9)
    results = []
    for count in (1, 4):
        options = {"steps": 3, "warmup": 1, "ema": 0.0, "precision": "64-true", "accumulate": count}
        state, loader = tiny.state(build(case, depth=0.6), **options)
        batches = loader.batches(0, 3)
        for step in range(3):
            loop.update(state, batches, step)
        results.append(state.objective.state_dict())
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("case", ["simclr", "simclr_of_all_patches", "contrastive_tuning"])
def test_the_order_of_a_batch_changes_nothing(case):
    objective = shaken(build(case, depth=0.6)).double()
    given = batch(objective)
    turned = part(given, torch.tensor([5, 2, 0, 3, 1, 4]))
    assert run(objective, given)["loss"].item() == pytest.approx(run(objective, turned)["loss"].item(), rel=1e-9)


@EVERY
def test_stochastic_depth_is_a_function_of_the_seed_and_is_off_in_evaluation(case):
    objective = shaken(build(case, depth=0.6))
    given = batch(objective)
    loss = run(objective, given)["loss"]
    torch.manual_seed(99)
    assert torch.equal(run(objective, given)["loss"], loss)
    assert not torch.equal(run(objective, given._replace(seed=1))["loss"], loss)
    same = shaken(build(case))
    assert torch.equal(run(objective.eval(), given)["loss"], run(same.eval(), given)["loss"])


@pytest.mark.parametrize("case", SAMPLING)
def test_samples_are_a_function_of_seed_and_slot(case):
    objective, slots = build(case), torch.arange(200) + (1 << 40)
    whole = objective.sample(slots, seed=5)
    order = torch.randperm(200)
    torch.manual_seed(7)
    for choice, again in zip(whole, objective.sample(slots[order], seed=5), strict=True):
        assert len(choice) == 200
        assert torch.equal(choice[order], again)
    assert not torch.equal(whole[0], objective.sample(slots, seed=6)[0])
    assert len(whole[0].flatten(1).unique(dim=0)) > 10
    if case in ("ibot", "latent", "simclr"):  # several views or masks of an image
        assert not torch.equal(whole[0][:, 0], whole[0][:, 1])


@pytest.mark.parametrize("case", [case for case in SAMPLING if case != "masked_patch"])
@torch.no_grad()
def test_hidden_patches_change_no_prediction_and_all_others_do(case):
    """test_masked_patch.py covers corrupted patches that are unchanged or copied."""
    objective, images = shaken(build(case)).eval(), tiny.pictures(6)
    noise = objective.sample(torch.arange(6), seed=0)
    hidden = noise.masked_ids if case == "mae" else noise[0]
    if case == "latent":
        hidden = noise.masked_ids[:, 0]
    elif case == "ibot":
        hidden = noise.ids[:, 0, :2]
    elif case == "simclr":
        hidden = [set(range(16)) - set(visible) for visible in noise[0][:, 0].tolist()]

    def predict(images: torch.Tensor) -> torch.Tensor:
        if case == "simclr":
            return objective.project(torch.stack([images, images], 1), noise)[:6]
        if case == "ibot":
            return objective.student_logits(images, noise.ids[:, 0], torch.full((6,), 2))[1]
        return objective.predict(images, noise)[0][:, 0] if case == "latent" else objective.predict(images, noise)

    before = predict(images)
    for place in range(16):
        differs = (predict(tiny.inverted(images, place)) != before).flatten(1).any(1).tolist()
        assert differs == [place not in ids for ids in hidden]


@EVERY
def test_bytes_and_fractions_give_the_same_loss(case):
    objective, given = shaken(build(case)), batch(build(case))
    fractions = given._replace(views={name: view / 255 for name, view in given.views.items()})
    before = {name: view.clone() for name, view in fractions.views.items()}
    assert run(objective, fractions)["loss"].item() == pytest.approx(run(objective, given)["loss"].item(), rel=1e-4)
    assert all(view.equal(before[name]) for name, view in fractions.views.items())


@pytest.mark.parametrize("case", ["dino", "ibot", "simclr", "contrastive_tuning"])
def test_views_that_do_not_fit_are_one_line(case):
    objective, given = build(case), batch(build(case))
    for views in ({"image": tiny.pictures(6)}, {**given.views, "global": given.views["global"][:, :1]}):
        with pytest.raises(UserError, match=r"^data\.augment: [^\n]*$"):
            run(objective, given._replace(views=views))


@EVERY
def test_its_state_and_its_metadata_are_enough_to_build_it_again(case):
    objective, other, same = shaken(build(case)), build(case, seed=3), build(case).state_dict()
    assert all(value.equal(same[name]) for name, value in build(case).state_dict().items())
    assert not all(value.equal(same[name]) for name, value in other.state_dict().items())
    other.load_state_dict(objective.state_dict())
    given = batch(objective)
    assert torch.equal(run(other, given)["loss"], run(objective, given)["loss"])
    assert torch.equal(run(copy.deepcopy(objective), given)["loss"], run(objective, given)["loss"])
    facts = json.loads(json.dumps(objective.metadata))
    prefix = f"{facts.get('backbone', 'encoder')}."
    assert objective.get_submodule(prefix[:-1]) is objective.backbone()
    if not case.endswith("lora"):
        encoder = options_from(facts["encoder"]).build()
        state = objective.state_dict().items()
        encoder.load_state_dict({name.removeprefix(prefix): x for name, x in state if name.startswith(prefix)})
        torch.testing.assert_close(encoder.eval()(tiny.pictures(2)), objective.backbone().eval()(tiny.pictures(2)))
    assert ("backbone" in facts) == isinstance(objective, Dino | Continuation)


DECODER = {"depth": 1, "width": 8, "heads": 2}
HIDDEN = {"mask": 1, "replace": 0, "unchanged": 0}
STEM = {"patch_size": 8, "stem": {"width": 32, "layers": [1], "epsilons": "authors"}}
# For each option, a value outside of its type, range or choices.
OUTSIDE = {
    mae_options.MAE: {"masked": 0, "norm_pixels": 1},
    masked_patch_options.MaskedPatch: {"decoder": 3, "masking": 0.5},
    masked_patch_options.Masking: {"corrupted": 0, "mask": -0.1, "unchanged": None, "shape": "blocks", "unit": 0},
    dino_options.Dino: {"prototypes": 1, "student_temperature": 0, "center_momentum": 1.5, "last_layer": 3},
    dino_options.IBot: {"masked": 0, "spread": 0.4, "probability": 2, "patch_weight": -1},
    latent_options.Latent: {"masked": 0, "masks": 0, "decoder": 3},
    contrastive_options.SimCLR: {"temperature": 0, "keep": 1.5, "layers": 1, "projection": 0},
    contrastive_options.ContrastiveTuning: {"trained": 0, "heads_only": 2, "queue": 0},
    distill_options.Distill: {"features": "all", "loss": "l1", "hidden": 0, "mixup": 1, "cached": 2},
    diet_options.Diet: {"label_smoothing": 1.0, "normalize": 1},
    continuation_options.Continuation: {"trained": -1, "heads_only": 1.5, "encoder_lr": 0, "lora": 8, "anchor": 3},
    continuation_options.Anchor: {"kind": "l2", "weight": 0},
    codebook_options.Codebook: {"clusters": 1, "images": 0, "components": 0, "layer": 2},
    targets_options.Hog: {"cell": 0},
    targets_options.MeanColor: {"bits": 0, "grid": 0},
    targets_options.Pixels: {"loss": "l3"},
    classify_options.Distillation: {"kind": "loud", "temperature": 0, "weight": 1.1},
    classify_options.Classify: {
        "classes": ["ant"], "label_smoothing": 1.0, "mixup": True, "cutmix": math.nan, "hidden": 1.5, "loss": "hinge",
        "distillation": "deit", "trained": "tail", "class_weights": "fair",
    },
    segment_options.Segment: {
        "classes": ["ant"], "head": "upernet", "layers": [0], "trained": "tail", "class_weights": [-1.0], "resize": 2,
        "overlap": 1.0,
    },
}  # fmt: skip
INVALID = [
    *((options, name, {name: value}) for options, values_ in OUTSIDE.items() for name, value in values_.items()),
    (mae_options.MAE, "decoder.width", {"decoder": DECODER | {"width": 18}}),
    (mae_options.MAE, "decoder.heads", {"decoder": DECODER | {"heads": 3}}),
    (mae_options.MAE, "decoder.depth", {"decoder": DECODER | {"depth": 0}}),
    (mae_options.MAE, "decoder.heads", {"decoder": {"depth": 1, "width": 16}}),
    (masked_patch_options.MaskedPatch, "masking.mask", {"decoder": DECODER}),
    (masked_patch_options.Masking, "mask + replace + unchanged", {"mask": 0.9}),
    (dino_options.Dino, "teacher_momentum.end", {"teacher_momentum": {"start": 0.9, "end": 1.1}}),
    (dino_options.Dino, "teacher_momentum.form", {"teacher_momentum": {"start": 0.9, "form": 1}}),
    (dino_options.Dino, "teacher_temperature.start", {"teacher_temperature": {"start": 0, "end": 0.1}}),
    (dino_options.Dino, "last_layer.shape", {"last_layer": {"start": 0, "shape": "jump"}}),
    (dino_options.IBot, "patch_temperature.start", {"patch_temperature": {"start": 0}}),
    (latent_options.Latent, "decoder.groups", {"decoder": {"depth": 1, "width": 12, "groups": 5}}),
    (latent_options.Latent, "decoder.depth", {"decoder": {"width": 8}}),
    (codebook_options.Codebook, "checkpoint", {"checkpoint": "/no/where", "layer": 2}),
    (codebook_options.Codebook, "layer", {"checkpoint": "/"}),
    (classify_options.Classify, "label_smoothing", {"loss": "multi_label", "label_smoothing": 0.1}),
    (classify_options.Classify, "target_threshold", {"target_threshold": 0.2}),
    (classify_options.Classify, "trained", {"trained": 0}),
    (segment_options.Segment, "layers", {"layers": [1, 1]}),
    (segment_options.Segment, "trained", {"lora": {"rank": 2, "alpha": 2}}),
    (segment_options.Segment, "class_weights", {"classes": ["ant", "bee"], "class_weights": [1.0]}),
    (continuation_options.Continuation, "trained", {"lora": {"rank": 2, "alpha": 2}}),
    (classify_options.Classify, "lora", {"trained": "head", "lora": 8}),
    (classify_options.Classify, "lora.alpha", {"trained": "head", "lora": {"rank": 8}}),
    (classify_options.Classify, "lora.rank", {"trained": "head", "lora": {"rank": 0, "alpha": 1}}),
    (classify_options.Classify, "lora.alpha", {"trained": "head", "lora": {"rank": 2, "alpha": 0}}),
    (classify_options.Classify, "trained", {"trained": "all", "lora": {"rank": 2, "alpha": 2}}),
]


@pytest.mark.parametrize(("options", "name", "values_"), INVALID)
def test_an_invalid_option_is_named(options, name, values_):
    if options is distill_options.Distill:
        values_ = {"teacher": {"_part_": "teacher/encoder", "path": str(tiny.TEACHER)}} | values_
    assert error_of(options, **values_).name == name


@pytest.mark.parametrize(
    ("name", "case", "options", "encoder"),
    [
        ("masked", mae_options.MAE, {}, {"patch_size": 16}),
        ("norm_pixels", mae_options.MAE, {}, {"patch_size": 1, "channels": 1}),
        ("masking.corrupted", masked_patch_options.MaskedPatch,
         {"decoder": DECODER, "masking": {**HIDDEN, "corrupted": 1.0}}, {}),
        ("masking.corrupted", masked_patch_options.MaskedPatch, {"decoder": DECODER, "masking": HIDDEN},
         {"patch_size": 16}),
        ("layers", latent_options.Latent, {"layers": 3}, {}),
        ("decoder.groups", latent_options.Latent,
         {"layers": 2, "decoder": {"depth": 1, "width": 35, "groups": 5}}, {}),
        ("class_token_weight", latent_options.Latent, {"layers": 2}, {"class_token": False, "pooling": "patch_mean"}),
        ("masked", latent_options.Latent, {"layers": 2}, {"patch_size": 16}),
        ("trained", contrastive_options.ContrastiveTuning, {"trained": 3}, {}),
        ("trained", classify_options.Classify, {"trained": 3}, {}),
        ("trained", segment_options.Segment, {"trained": 3}, {}),
        ("layers", segment_options.Segment, {"layers": [2, 3]}, {}),
        ("masked", mae_options.MAE, {}, STEM),
        ("decoder", masked_patch_options.MaskedPatch, {"decoder": DECODER, "masking": HIDDEN}, STEM),
        ("keep", contrastive_options.SimCLR, {"keep": 0.5}, STEM),
        ("window", codebook_options.Codebook, {"window": 3}, {}),
        ("window", codebook_options.Codebook, {"window": [12, 2]}, {}),
        ("window", codebook_options.Codebook, {"window": 40}, {}),
        ("images", codebook_options.Codebook, {"images": 20}, {}),
        ("cell", targets_options.Hog, {"cell": 8, "window": None}, {}),
        ("cell", targets_options.Hog, {"cell": 5, "window": 12}, {}),
        ("window", targets_options.Hog, {"cell": 1, "window": 3}, {}),
        ("window", targets_options.Hog, {"cell": 1, "window": 7}, {}),
        ("grid", targets_options.MeanColor, {"grid": 3}, {}),
        ("grid", targets_options.MeanColor, {"grid": 4}, {"image_size": [16, 12], "patch_size": [8, 6]}),
        ("bits", targets_options.MeanColor, {"bits": 9}, {"channels": 1}),
        ("bits", targets_options.MeanColor, {"bits": 6}, {}),
    ],
)  # fmt: skip
def test_an_option_that_does_not_fit_the_encoder_is_named(name, case, options, encoder):
    shape = {"image_size": 16, "patch_size": 4, "width": 16, "depth": 2, "heads": 2}
    assert error_of(case(**options).check_encoder, options_from(shape | encoder)).name == name


SMALL = {
    "masked_patch_decoder": ["objective.decoder.width=16", "objective.decoder.heads=2"],
    "simmim": [],
    "mae": ["objective.decoder.width=16", "objective.decoder.heads=2"],
    "dino": ["data.augment.local_size=8", *(f"objective.{name}=16" for name in ("prototypes", "hidden", "bottleneck"))],
    "ibot": ["data.augment.local_size=8", *(f"objective.{name}=16" for name in ("prototypes", "hidden", "bottleneck"))],
    "latent": ["objective.layers=2", "objective.masks=2", "objective.decoder.width=16", "objective.decoder.groups=4"],
    "simclr": ["objective.hidden=16", "objective.projection=8"],
    "diet": [],
    "distill": [f"teacher={tiny.TEACHER}"],
}


def command(objective: str, *options: str) -> list[str]:
    run = tiny_options("target")
    return [*run, f"objective={objective}", *SMALL[objective], *options]


@pytest.mark.parametrize(
    "objective", [pytest.param(name, marks=[pytest.mark.slow] * (name in ("simmim", "dino"))) for name in SMALL]
)
def test_the_command_trains_evaluates_and_keeps_the_backbone(objective, tool, tmp_path, capsys):
    """The contract of evaluators covers their figures, so that one run with figures suffices."""
    evaluator, *every = (
        ("label_free", "evaluators.label_free.every=3") if objective in ("diet", "distill") else ("held_out",)
    )
    figures = ("collapse", "patch_collapse", "probes") if objective == "ibot" else ()
    drawn = ["figures=end", "probes=[knn]", "probing.every=3"] if figures else ["probes=[]"]
    options = command(objective, f"evaluators.{evaluator}.images=16", *drawn, *every)
    tool("pretrain", *options)
    folder = tmp_path / "outputs" / f"{objective}_shapes"
    for figure in figures:
        with Image.open(folder / f"{figure}.png") as image:
            assert min(image.size) > 150
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    evaluated = [row["step"] for row in found if any(name.startswith(f"{evaluator}/") for name in row)]
    assert evaluated == [0, 3, 6]
    checkpoint = Checkpoint.open(folder)
    weights = storage.load(checkpoint)["model"]
    encoder = tiny.loaded(folder, announce=True)
    for name, value in encoder.state_dict().items():
        assert value.equal(weights[f"{checkpoint.backbone}.{name}"]), name
    assert ("not loaded: decoder" in capsys.readouterr().out) == any(name.startswith("decoder") for name in weights)
