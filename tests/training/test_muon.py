"""Muon: the orthogonalised update equals singular value decompositions and torch's Muon; complete runs."""

import math

import pytest
import tiny
import torch
from runs import assert_close, final

from ssvit.models.lora import restrict
from ssvit.models.vit_options import Lora
from ssvit.training import launch, loop, muon
from ssvit.training.muon import COEFFICIENTS, RMS, Muon, block_matrices, orthogonalize

JORDAN = ((3.4445, -4.7750, 2.0315),) * 5  # of torch.optim.Muon
SHAPES = [(24, 24), (24, 96), (96, 24), (72, 24)]


def polynomial(x):
    for a, b, c in COEFFICIENTS:
        x = a * x + b * x**3 + c * x**5
    return x


def decomposed(matrix):
    """Apply the polynomials to the singular values of a float64 matrix."""
    u, s, vt = torch.linalg.svd(matrix, full_matrices=False)
    return (u * polynomial(s / s.norm())) @ vt


def ill_conditioned(shape, seed=0):
    """A float64 matrix with singular values from 1 to 1e-4."""
    generator = torch.Generator().manual_seed(seed)
    u, _, vt = torch.linalg.svd(torch.randn(shape, dtype=torch.float64, generator=generator), full_matrices=False)
    return (u * torch.logspace(0, -4, min(shape), dtype=torch.float64)) @ vt


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "error"), [(torch.float64, 1e-9), (torch.float32, 1e-4), (torch.bfloat16, 0.05)])
def test_iterations_change_the_singular_values_and_keep_the_singular_vectors(shape, dtype, error):
    matrices = torch.stack([ill_conditioned(shape, seed) for seed in range(3)])
    expected = torch.stack([decomposed(matrix) for matrix in matrices])
    assert (orthogonalize(matrices, dtype) - expected).abs().max() < error


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_singular_values_of_an_update_are_near_1(shape, dtype):
    generator = torch.Generator().manual_seed(0)
    ones = torch.ones(shape)
    for matrix in (torch.randn(shape, generator=generator), ones, 1e-12 * ones, torch.eye(*shape)):
        values = torch.linalg.svdvals(orthogonalize(matrix[None], dtype)[0])
        present = torch.linalg.svdvals(matrix) > 0.003 * torch.linalg.matrix_norm(matrix)
        if matrix.abs().max() > 1e-9:  # smaller than any gradient: shrinks, and stays finite
            assert (values[present] - 1).abs().max() < 0.25
        assert values.isfinite().all()
    assert not orthogonalize(torch.zeros(1, *shape), dtype).any()


def test_it_takes_the_steps_of_torch(monkeypatch):
    monkeypatch.setattr(muon, "COEFFICIENTS", JORDAN)
    torch.manual_seed(0)
    ours = [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    theirs = [torch.nn.Parameter(weight.detach().clone()) for weight in ours]
    options = {"lr": 0.02, "weight_decay": 0.3}
    groups = [{"params": ours, **options}]
    optimizer = Muon(groups, dict.fromkeys(ours, 1), lr=1.0, momentum=0.9, dtype=torch.bfloat16)
    other = torch.optim.Muon(theirs, momentum=0.9, adjust_lr_fn="match_rms_adamw", **options)
    for _ in range(5):
        before = [weight.detach().clone() for weight in ours]
        for mine, its in zip(ours, theirs, strict=True):
            mine.grad = torch.randn_like(mine)
            its.grad = mine.grad.clone()
        optimizer.step()
        other.step()
        for mine, its, former in zip(ours, theirs, before, strict=True):
            moved = (its.detach() - former).norm()
            assert (mine - its).detach().norm() < 0.02 * moved  # the norms are rounded in another order
            its.data.copy_(mine.detach())


@pytest.mark.parametrize(("kind", "updated"), [("query_value", {"qkv"}), ("attention", {"qkv", "out"})])
def test_layers_with_low_rank_updates_have_no_matrices(kind, updated):
    encoder = tiny.encoder(0.0)
    names = {weight: name for name, weight in encoder.named_parameters()}
    before = {names[weight]: count for weight, count in block_matrices(encoder).items()}
    restrict(encoder, "head", Lora(rank=2, alpha=4, matrices=kind))
    after = {names.get(weight): count for weight, count in block_matrices(encoder).items()}
    assert after == {name: count for name, count in before.items() if name.split(".")[-2] not in updated}
    assert len(before) == 8
    assert len(after) == 8 - 2 * len(updated)


def test_a_sharded_encoder_with_low_rank_updates_is_trained_as_an_unsharded_one(tmp_path):
    lora = {"rank": 2, "alpha": 3.0, "matrices": "query_value"}
    options = {**RUN, "precision": "64-true", "steps": 4}
    try:
        for strategy in ("auto", "fsdp"):
            objective = tiny.continuation(trained=1, lora=lora)
            tiny.train(tmp_path / strategy, objective=objective, strategy=strategy, **options)
    finally:
        launch.destroy_process_group()
    assert_close(tmp_path / "auto", tmp_path / "fsdp")


RUN = {"optimizer": "muon", "lr": 1e-2, "warmup": 2, "weight_decay": 0.1, "weight_decay_end": 0.4, "layer_decay": 0.5,
       "clip": 0.1, "ema": 0.0}  # fmt: skip


def test_a_run_takes_the_steps_of_a_plain_loop():
    """Against loops over single matrices in float64, with singular value decompositions and AdamW's formulas."""
    objective, plain = (tiny.masked_patch_decoder().double() for _ in range(2))
    state, loader = tiny.state(objective, **RUN, precision="64-true", steps=5)
    batches = loader.batches(0, 5)
    for step in range(5):
        loop.update(state, batches, step)

    packed = {"qkv.weight": 3, "out.weight": 1, "expand.weight": 1, "contract.weight": 1}
    means = {name: torch.zeros_like(weight) for name, weight in plain.named_parameters()}
    squares = {name: torch.zeros_like(weight) for name, weight in plain.named_parameters()}
    for step, batch in enumerate(loader.batches(0, 5)):
        loss = plain(batch, plain.sample(batch.slots, seed=0))["loss"]
        gradients = dict(zip(means, torch.autograd.grad(loss, list(plain.parameters())), strict=True))
        norm = math.sqrt(sum(float((gradient**2).sum()) for gradient in gradients.values()))
        decay = 0.4 + (0.1 - 0.4) * (1 + math.cos(math.pi * step / 4)) / 2
        for name, weight in plain.named_parameters():
            gradient = gradients[name] * min(1, 0.1 / (norm + 1e-6))
            above = {"encoder.norm": 0, "encoder.blocks.1": 1, "encoder.blocks.0": 2}
            layers = next((n for part, n in above.items() if name.startswith(part)), 3 * name.startswith("encoder"))
            lr = state.recipe.learning_rate(step) * 0.5**layers
            count = next((n for end, n in packed.items() if "blocks" in name and name.endswith(end)), 0)
            decays = weight.ndim > 1 and "token" not in name and "positions" not in name
            with torch.no_grad():
                weight *= 1 - lr * decay * decays
                if count:
                    means[name] = 0.95 * means[name] + 0.05 * gradient
                    parts = (0.05 * gradient + 0.95 * means[name]).chunk(count)
                    weight -= lr * torch.cat([RMS * math.sqrt(max(part.shape)) * decomposed(part) for part in parts])
                else:
                    means[name] = 0.9 * means[name] + 0.1 * gradient
                    squares[name] = 0.95 * squares[name] + 0.05 * gradient**2
                    mean, square = means[name] / (1 - 0.9 ** (step + 1)), squares[name] / (1 - 0.95 ** (step + 1))
                    weight -= lr * mean / (square.sqrt() + 1e-8)
    for (name, ours), expected in zip(objective.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")


def test_a_skipped_step_changes_nothing():
    state, loader = tiny.state(tiny.mae(), **RUN)
    loop.update(state, loader.batches(0, 2), 0)
    before = {kind: {name: t.clone() for name, t in tensors.items()} for kind, tensors in state._states().items()}
    state.schedule(1)
    for weight in state.objective.parameters():
        weight.grad = torch.full_like(weight, math.nan) if weight.requires_grad else None
    state.apply(1, {}, {}, torch.tensor(False))
    torch.testing.assert_close(state._states(), before, rtol=0, atol=0)


def test_without_matrices_to_train_it_is_adamw(tmp_path, capsys):
    for optimizer in ("muon", "adamw"):
        tiny.train(tmp_path / optimizer, objective=tiny.classify(trained="head"), **RUN | {"optimizer": optimizer})
        assert ("recipe.optimizer=muon" in capsys.readouterr().out) == (optimizer == "muon")
    assert final(tmp_path / "muon") == final(tmp_path / "adamw")
