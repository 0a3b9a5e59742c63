"""The exact search finds what brute force in float64 finds, but for near-ties, however the work is shared."""

import os
import subprocess
import sys
from importlib.metadata import version

import pytest
import tiny
import torch
from command import LIMIT
from ranks import results

from ssvit.errors import OptionError, UserError
from ssvit.evaluation.neighbours import Neighbours, nearest, search
from ssvit.evaluation.options import HNSW

TOLERANCE = 2e-6 if version("faiss-cpu").startswith("1.9.") else 1e-6  # that version rounds more


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def cosines(queries: torch.Tensor, train: torch.Tensor) -> torch.Tensor:
    """Return all similarities in float64."""
    one, other = (torch.nn.functional.normalize(vectors.double(), eps=1e-300) for vectors in (queries, train))
    return one @ other.T


def assert_nearest(
    found: Neighbours, queries: torch.Tensor, train: torch.Tensor, k: int, own: torch.Tensor | None = None
) -> None:
    """Found are k different images, best first, equals in order, no other more similar by more than TOLERANCE."""
    expected = cosines(queries, train)
    if own is not None:
        rows = (own >= 0).nonzero()[:, 0]
        expected[rows, own[rows]] = -torch.inf
    similarities, indices = found
    assert similarities.dtype == torch.float32
    assert indices.dtype == torch.int64
    assert all(len(set(row)) == k for row in indices.tolist())
    torch.testing.assert_close(similarities.double(), expected.gather(1, indices), rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(similarities.double(), expected.topk(k).values, rtol=0, atol=TOLERANCE)
    falls, rises = (similarities.diff() < 0), (indices.diff() > 0)
    assert ((similarities.diff() <= 0) & (falls | rises)).all()


def same(found: Neighbours, expected: Neighbours) -> bool:
    return all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


def clustered(count: int, d: int, *, centres: int, spread: float, seed: int) -> torch.Tensor:
    centre = tiny.noise(centres, d)[torch.arange(count) % centres]
    return centre + spread * tiny.noise(count, d, seed=seed)


CASES = {
    "normal": lambda d: (tiny.noise(70, d), tiny.noise(3001, d, seed=1)),
    # All cosines near 1, as of an encoder whose features share a large mean.
    "near one direction": lambda d: (20 + tiny.noise(70, d), 20 + tiny.noise(3001, d, seed=1)),
    "tiny and huge": lambda d: (1e-30 * tiny.noise(70, d), 1e30 * tiny.noise(3001, d, seed=1)),
    "tight clusters": lambda d: (
        clustered(70, d, centres=3, spread=1e-4, seed=1),
        clustered(3001, d, centres=3, spread=1e-4, seed=2),
    ),
    "copies": lambda d: (tiny.noise(70, d), tiny.noise(40, d, seed=1).repeat(75, 1)),
    "all the same": lambda d: (torch.ones(70, d), torch.ones(3001, d)),
    "zeros among them": lambda d: (
        tiny.noise(70, d) * (torch.arange(70) % 3 > 0)[:, None],
        tiny.noise(3001, d, seed=1) * (torch.arange(3001) % 3 > 0)[:, None],
    ),
    "one far from the rest": lambda d: (
        tiny.noise(70, d),
        torch.cat((3 + 0.1 * tiny.noise(3000, d, seed=1), -torch.ones(1, d))),
    ),
}


@pytest.mark.parametrize("d", [1, 2, 31, 192])
@pytest.mark.parametrize("case", CASES)
def test_finds_what_brute_force_finds(case, d):
    queries, train = CASES[case](d)
    assert_nearest(search(queries, train, 20), queries, train, 20)


@pytest.mark.parametrize("n", [1, 2, 33, 320, 321])
@pytest.mark.parametrize("m", [1, 2, 31, 257])
def test_finds_it_for_any_number_of_queries_images_and_neighbours(m, n):
    queries, train = tiny.noise(m, 9), tiny.noise(n, 9, seed=1)
    for k in {1, min(10, n), n}:
        assert_nearest(search(queries, train, k), queries, train, k)


def test_no_layout_type_number_of_threads_or_other_query_changes_the_answer():
    queries, train = tiny.noise(64, 50), tiny.noise(3000, 50, seed=1)
    expected = search(queries, train, 10)
    assert same(search(queries.T.contiguous().T, train.repeat(1, 2)[:, :50], 10), expected)
    assert same(search(queries.double(), train, 10), expected)
    assert same(search(queries[7:50], train, 10), Neighbours(*(column[7:50] for column in expected)))
    torch.set_num_threads(2)
    assert same(search(queries, train, 10), expected)


@pytest.mark.parametrize("n", [6, 2000])
def test_leaves_the_query_itself_out_but_not_its_copies(n):
    train = tiny.noise(n, 8)
    train[3] = train[0]
    for own in (torch.arange(n), torch.arange(n).where(torch.arange(n) % 2 == 0, -1)):
        found = search(train, train, 5, excluded=own)
        assert_nearest(found, train, train, 5, own)
        assert found.indices[0, 0] == 3
        assert not (found.indices == own[:, None]).any()


def test_no_queries_have_no_neighbours():
    found = search(tiny.noise(0, 8), tiny.noise(10, 8), 3)
    assert found.similarities.shape == found.indices.shape == (0, 3)


@pytest.mark.parametrize(
    ("queries", "train", "k", "own", "message"),
    [
        (tiny.noise(2, 4), tiny.noise(9, 4), 10, None, r"k=10: .*\b9\b"),
        (tiny.noise(2, 4), tiny.noise(9, 4), 9, torch.tensor([0, 1]), r"k=9: .*\b8\b"),
        (tiny.noise(2, 4), tiny.noise(9, 4) / torch.zeros(9, 1), 1, None, r"\btraining image 0\b"),
    ],
)
def test_says_in_a_line_what_cannot_be(queries, train, k, own, message):
    with pytest.raises(UserError, match=message) as caught:
        search(queries, train, k, excluded=own)
    assert isinstance(caught.value, OptionError) == message.startswith("k=")


def answers() -> list:
    """The results of searches, of which one process of several has a part."""
    queries, train = tiny.noise(100, 64), tiny.noise(4000, 64)
    train[1000:2000] = train[:1000]  # ties
    found = [search(queries, train, 10), search(queries, train, 10, excluded=torch.arange(100))]
    found.append(search(queries[:2], train, 10))
    queries[-1] = torch.inf
    with pytest.raises(UserError, match=r"\bquery image 99\b"):
        search(queries, train, 10)
    return [[column.tolist() for column in answer] for answer in found]


@pytest.mark.parametrize("world", [1, 3])
def test_processes_together_find_what_one_does(tmp_path, world):
    assert results(answers, world, tmp_path) == [answers()] * world


def test_a_graph_finds_more_neighbours_than_the_candidates_that_it_keeps():
    """Features with a large common mean are difficult: k candidates would yield fewer than k neighbours."""
    vectors = torch.nn.functional.normalize(20 + tiny.noise(2000, 32), dim=1)
    index = HNSW(links=4, ef_construction=10, ef_search=1).build(vectors=vectors)
    assert (nearest(index, vectors[:200], 200).indices >= 0).all()


VECTOR_INSTRUCTIONS = """
import os, threadpoolctl, torch
from ssvit.kernels.fast_faiss import faiss
pools = [pool for pool in threadpoolctl.threadpool_info() if pool["user_api"] == "blas" and "faiss" in pool["filepath"]]
found = [pool["architecture"] for pool in pools]
print(torch.backends.cpu.get_cpu_capability(), *found, os.environ.get("OPENBLAS_CORETYPE"))
"""


def test_faiss_uses_the_vector_instructions_of_the_cpu_and_the_environment_is_unchanged():
    environment = {name: value for name, value in os.environ.items() if name != "OPENBLAS_CORETYPE"}
    done = subprocess.run(
        [sys.executable, "-c", VECTOR_INSTRUCTIONS], env=environment, capture_output=True, text=True, timeout=LIMIT
    )
    assert done.returncode == 0, done.stderr
    capability, *architectures, variable = done.stdout.split()
    assert variable == "None"
    if not architectures or capability not in ("AVX2", "AVX512"):
        pytest.skip("faiss has no OpenBLAS of its own here, or the CPU has no vector instructions for it")
    assert architectures == [{"AVX2": "Haswell", "AVX512": "SkylakeX"}[capability]]
