"""Continuation from existing weights: what is trained when and how fast, and the penalties, against loops."""

import copy
import math
from types import SimpleNamespace

import pytest
import tiny
import torch
from command import error_of
from runs import states

from ssvit.data.batch import Batch
from ssvit.models.lora import merged, restrict
from ssvit.models.vit_options import Lora
from ssvit.objectives import continuation_options, contrastive_options
from ssvit.objectives.continuation import Anchor, Continuation
from ssvit.objectives.schedule import Progress
from ssvit.training import loop

LORA = {"rank": 2, "alpha": 3.0, "matrices": "query_value"}
SAFE = {"trained": 1, "lora": LORA}


def adapted(**options):
    torch.manual_seed(1)
    return tiny.shaken(restrict(tiny.encoder(0.0), options.get("trained", 0), Lora(**LORA))).double()


def test_queries_and_values_have_updates_of_their_own():
    """Each element of the packed matrix is computed by loops; the keys and the output matrix stay."""
    encoder = adapted()
    state = encoder.state_dict()
    width = encoder.width
    for number in range(2):
        layer = encoder.blocks[number].attention.qkv
        prefix = f"blocks.{number}.attention.qkv.parametrizations.weight"
        original, a, b = (state[f"{prefix}.{name}"] for name in ("original", "0.a", "0.b"))
        expected = original.clone()
        for part, first in ((0, 0), (1, 2 * width)):
            for o in range(width):
                for i in range(width):
                    update = sum(b[part, o, r].item() * a[part, r, i].item() for r in range(2))
                    expected[first + o, i] += 3.0 / 2 * update
        torch.testing.assert_close(layer.weight, expected, rtol=1e-12, atol=1e-12)
        assert not hasattr(encoder.blocks[number].attention.out, "parametrizations")


@pytest.mark.parametrize("trained", [0, 1])
def test_merged_weights_compute_the_same_outputs(trained):
    encoder = adapted(trained=trained)
    plain = tiny.encoder(0.0).double()
    plain.load_state_dict(merged(encoder.state_dict(), Lora(**LORA)))
    images = tiny.pictures(4)
    torch.testing.assert_close(plain(images), encoder(images), rtol=1e-9, atol=1e-12)


def test_the_initial_features_are_those_of_the_start():
    torch.manual_seed(0)
    plain = tiny.encoder(0.0)
    encoder = restrict(copy.deepcopy(plain), 1, Lora(**LORA))
    images = tiny.pictures(4)
    assert torch.equal(encoder(images), plain(images))


def test_the_parts_that_are_trained():
    objective = tiny.continuation(**SAFE)
    trained = {name for name, weight in objective.encoder.named_parameters() if weight.requires_grad}
    last = {name for name, _ in objective.encoder.named_parameters() if name.startswith(("blocks.1.", "norm."))}
    assert trained == last | {f"blocks.0.attention.qkv.parametrizations.weight.0.{part}" for part in "ab"}
    assert all(weight.requires_grad for name, weight in objective.named_parameters() if "decoder" in name)
    assert all(weight.requires_grad for weight in tiny.continuation().parameters())


def test_heads_are_trained_alone_at_first(tmp_path):
    """12 steps, of which 0.4 * 12 < 5 leave the encoder unchanged to the bit."""
    tiny.train(tmp_path, objective=tiny.continuation(), save_every=1, weight_decay=0.1, warmup=1)
    before = tiny.continuation().state_dict()
    kept = sorted(tmp_path.glob("step_*"))
    assert len(kept) < 12  # older checkpoints are deleted, so the schedule is read below
    assert not all(states(kept[-1])["model"][name].equal(value) for name, value in before.items())
    encoder_trained = tiny.continuation().schedules["encoder_trained"]
    assert [encoder_trained(Progress(step, 12)) for step in range(12)] == [0.0] * 5 + [1.0] * 7


@pytest.mark.parametrize(("steps", "moves"), [(5, False), (6, True)])
def test_the_encoder_moves_after_its_first_steps(tmp_path, steps, moves):
    """The schedule of 12 steps is stopped in the middle."""
    objective = tiny.interrupted(tiny.continuation(), steps + 1)
    with pytest.raises(tiny.Interrupted):
        tiny.train(tmp_path, objective=objective, save_every=1, weight_decay=0.1, warmup=1, ema=0.0)
    saved, before = states(tmp_path / f"step_{steps:08d}")["model"], tiny.continuation().state_dict()
    for part, expected in (("encoder", moves), ("decoder", True)):
        names = [name for name in before if name.startswith(f"objective.{part}.") and before[name].is_floating_point()]
        assert any(not saved[name].equal(before[name]) for name in names) == expected


def test_the_gradient_of_the_encoder_is_not_clipped_while_heads_are_trained_alone():
    objective = tiny.continuation()
    state, loader = tiny.state(objective)
    for step in (0, 11):
        loop.accumulate(state, loader.batches(step, step + 1), step, state.schedule(step))
        names = {name for name, weight in objective.named_parameters() if weight.grad is not None}
        assert any(".decoder." in name for name in names)
        assert any(".encoder." in name for name in names) == (step == 11)


def test_a_teacher_is_part_of_the_identity_of_a_run():
    objective = tiny.distill()
    wrapped = Continuation(continuation_options.Continuation(), objective=objective)
    objective.teacher.origin = "checksum"
    assert wrapped.metadata["teacher"] == "checksum"
    assert wrapped.metadata["backbone"] == "objective.encoder"


def test_weights_must_be_trained():
    assert error_of(continuation_options.Continuation, trained=0).name == "trained"
    assert continuation_options.Continuation(trained=0, lora=LORA).trained == 0
    chosen = contrastive_options.ContrastiveTuning(heads_only=0.0)
    tree = SimpleNamespace(encoder=tiny.encoder(0.0).options, from_checkpoint=True, objective=chosen)
    assert error_of(continuation_options.Continuation(**SAFE).check, tree).name == "continuation"


def test_the_learning_rate_of_the_encoder_is_lower():
    objective = tiny.continuation()
    groups = objective.parameter_groups(weight_decay=0.1, layer_decay=0.5)
    share = {id(weight): group["share"] for group in groups for weight in group["params"]}
    plain = objective.measured().parameter_groups(weight_decay=0.1, layer_decay=0.5)
    for group in plain:
        for weight in group["params"]:
            inside = any(weight is other for other in objective.encoder.parameters())
            assert share[id(weight)] == group["share"] * (0.5 if inside else 1.0)
    assert len(share) == len(list(objective.parameters()))


def cosine(a: list[float], b: list[float]) -> float:
    dot, *squares = (sum(x * y for x, y in zip(*pair, strict=True)) for pair in ((a, b), (a, a), (b, b)))
    return dot / math.sqrt(squares[0] * squares[1])


def test_small_differences_from_the_start_are_computed_in_float32_under_autocast():
    anchor = Anchor(continuation_options.Anchor(kind="gram"), tiny.encoder(0.0))
    first, second = tiny.noise(2, 3, 9, 8)
    anchor.initial = lambda images: first

    class Moved:
        num_prefix_tokens = 1

        def __call__(self, images, depth_noise=None):
            return first + 1e-3 * second

    losses = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            losses.append(anchor.loss(Moved(), torch.empty(0)).item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


@pytest.mark.parametrize("kind", ["cosine", "gram"])
@torch.no_grad()
def test_a_penalty_is_its_formula(kind):
    start = tiny.encoder(0.0).double()
    anchor = Anchor(continuation_options.Anchor(kind=kind), start)
    images = tiny.pictures(3)
    assert anchor.loss(start, images).item() == pytest.approx(0, abs=1e-12)
    torch.manual_seed(4)
    encoder = tiny.shaken(copy.deepcopy(start), by=0.3)
    found = anchor.loss(encoder, images).item()
    before, after = (model(images).tolist() for model in (start, encoder))
    terms = []
    for one, two in zip(before, after, strict=True):
        patches, others = one[1:], two[1:]
        if kind == "gram":
            pairs = [(i, j) for i in range(16) for j in range(16)]
            terms += [(cosine(patches[i], patches[j]) - cosine(others[i], others[j])) ** 2 for i, j in pairs]
        else:
            pooled = cosine(one[0], two[0])
            of_patches = sum(cosine(a, b) for a, b in zip(patches, others, strict=True)) / 16
            terms.append(1 - (pooled + of_patches) / 2)
    assert start.pooling == "class_token"
    assert found == pytest.approx(sum(terms) / len(terms), rel=1e-9)
    assert found > 1e-3


def test_a_penalty_is_added_to_the_loss_and_holds_the_features():
    """After some steps, the features are closer to the initial ones with a larger weight."""
    distances = []
    for weight in (1e-3, 10.0):
        objective = tiny.continuation(anchor={"weight": weight})
        given = Batch.of_view(tiny.pictures(8))
        assert objective.anchor is not None
        optimizer = torch.optim.SGD(objective.parameters(), lr=0.01)
        for _ in range(30):
            outputs = objective(given, objective.sample(given.slots, seed=0))
            expected = outputs["objective"] + weight * outputs["anchor"]
            assert outputs["loss"].item() == pytest.approx(expected.item(), rel=1e-5)
            optimizer.zero_grad()
            outputs["loss"].backward()
            optimizer.step()
        with torch.no_grad():
            distances.append(objective.anchor.loss(objective.encoder, given.only_view()).item())
    assert distances[1] < distances[0] / 2
