"""recipe.backend: the choice of auto, random numbers in a compiled graph, and exact resumption."""

import os
import shutil
import sys
from pathlib import Path

import pytest
import tiny
import torch
import torch._inductor.config
from ranks import child, exit_codes
from runs import final, rows, train_in_processes

from ssvit.engine.randomness import uniform
from ssvit.errors import UserError
from ssvit.training import runtime
from ssvit.training.recipe import Recipe


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_random_numbers_are_the_same_in_a_compiled_graph():
    """Products must wrap at 64 bits, which torch's compiler does not do with constants."""
    torch._dynamo.reset()
    slots = torch.arange(5) + (1 << 40)
    assert torch.compile(uniform, fullgraph=True)(3, "test", slots, 7, 1).equal(uniform(3, "test", slots, 7, 1))


LONG = {"steps": 2_000_000, "batch_size": 10_000, "precision": "bf16-mixed"}


@pytest.mark.parametrize(
    ("recipe", "device", "world", "built", "works", "expected"),
    [
        (LONG, "cpu", 1, True, True, "kernels"), (LONG, "cpu", 1, False, True, "compile"),
        (LONG, "cpu", 100, False, True, "eager"), (LONG, "cpu", 1, False, False, "eager"),
        (LONG | {"steps": 2_000}, "cpu", 1, False, True, "eager"),
        ({"precision": "32-true"}, "cuda", 1, False, False, "compile"), (LONG, "mps", 1, True, True, "eager"),
    ],
)  # fmt: skip
def test_auto_uses_kernels_that_are_built_and_compiles_long_runs(
    recipe, device, world, built, works, expected, monkeypatch
):
    monkeypatch.setattr(runtime, "_compiles", lambda: works)
    monkeypatch.setattr(runtime.operators, "library", lambda: object() if built else None)
    choice, reason = runtime.backend(torch.device(device), world, Recipe(**recipe), tiny.encoder(0.0))
    assert choice == expected
    assert reason


@pytest.mark.parametrize(("types", "expected"), [({torch.float32}, "kernels"), (set(), "compile")])
def test_auto_uses_kernels_in_float32_only_where_onednn_multiplies_faster(types, expected, monkeypatch):
    monkeypatch.setattr(runtime, "_compiles", lambda: True)
    monkeypatch.setattr(runtime.fused, "TYPES", types)
    recipe = Recipe(**LONG | {"precision": "32-true"})
    assert runtime.backend(torch.device("cpu"), 1, recipe, tiny.encoder(0.0))[0] == expected


def test_kernels_must_be_built_before_they_are_required(monkeypatch):
    monkeypatch.setattr(runtime.operators, "version", lambda: "amx")
    alone = torch.device("cpu"), 1
    half, single = (Recipe(backend="kernels", precision=precision) for precision in ("bf16-mixed", "32-true"))
    monkeypatch.setattr(runtime.operators, "library", lambda: None)
    assert runtime.backend(*alone, single, tiny.encoder(0.0))[0] == "kernels"
    with pytest.raises(UserError, match="build-kernels"):
        runtime.backend(*alone, half, tiny.encoder(0.0))
    monkeypatch.setattr(runtime.operators, "library", lambda: object())
    assert runtime.backend(*alone, half, tiny.encoder(0.0))[0] == "kernels"


def compiles_with(compiler: str, cache: Path) -> None:
    """End this process, whose cache is empty: torch searches for the compiler once and caches compiled code."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
    torch._inductor.config.cpp.cxx = (None, compiler)
    sys.exit(3 if runtime._compiles() else 4)


@pytest.mark.parametrize("compiler", [pytest.param("no-such-compiler", marks=pytest.mark.slow), "false"])
def test_auto_needs_a_cpp_compiler(compiler, tmp_path):
    assert exit_codes([child(compiles_with, compiler, tmp_path)]) == [4]


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_a_compiled_run_trains_like_an_eager_one_and_resumes_exactly(tmp_path, world):
    options = {"ema": 0.0, "precision": "bf16-mixed"}

    def train(name: str, backend: str) -> None:
        assert train_in_processes(tmp_path / name, world, backend=backend, **options) == [0] * world

    train("eager", "eager")
    train("compiled", "compile")
    eager, compiled = (list(rows(tmp_path / name, "train/loss").values()) for name in ("eager", "compiled"))
    assert len(compiled) == len(eager) == 12
    assert compiled[:5] == pytest.approx(eager[:5], rel=1e-2)  # later, differences of rounding in bfloat16 have grown
    before = final(tmp_path / "compiled")
    shutil.rmtree(tmp_path / "compiled" / "step_00000012")
    train("compiled", "compile")
    assert final(tmp_path / "compiled") == before
