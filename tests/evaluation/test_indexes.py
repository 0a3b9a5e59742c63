"""Approximate indexes find most of the exact neighbours, repeatably, and distances are relative to the median."""

import faiss
import numpy as np
import pytest
import torch

from ssvit.errors import OptionError
from ssvit.evaluation.neighbours import Neighbours, nearest, relative_distances
from ssvit.evaluation.options import HNSW, IVF, Flat


@pytest.fixture(autouse=True)
def one_thread():
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    yield
    faiss.omp_set_num_threads(before)


def clustered(count: int, *, seed: int) -> torch.Tensor:
    """Unit vectors of clusters that overlap a little, the same ones for every seed."""
    centres = torch.randn(40, 16, generator=torch.Generator().manual_seed(99))
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(count, 16, generator=generator)
    vectors = centres[torch.randint(40, (count,), generator=generator)] + 0.4 * noise
    return torch.nn.functional.normalize(vectors.double()).float()


IMAGES, QUERIES = clustered(3000, seed=1), clustered(100, seed=2)


def build(kind: str = "flat", images: torch.Tensor = IMAGES, **options) -> faiss.Index:
    return {"flat": Flat, "ivf": IVF, "hnsw": HNSW}[kind](**options).build(vectors=images)


def search(kind: str, **options) -> Neighbours:
    return nearest(build(kind, **options), QUERIES, 10)


def recall(kind: str, **options) -> float:
    pairs = zip(search(kind, **options).indices.tolist(), search("flat").indices.tolist(), strict=True)
    return sum(len(set(approximate) & set(exact)) for approximate, exact in pairs) / 1000


@pytest.mark.parametrize(("kind", "effort"), [("ivf", "nprobe"), ("hnsw", "ef_search")])
def test_an_approximate_index_finds_most_neighbours_and_more_with_more_effort(kind, effort):
    assert recall(kind) > 0.9
    options = {"nlist": 60} if kind == "ivf" else {"links": 4, "ef_construction": 8}
    low, high = (recall(kind, **options, **{effort: value}) for value in ((1, 60) if kind == "ivf" else (10, 400)))
    assert low < high
    assert high == 1 or kind == "hnsw"


@pytest.mark.parametrize(("kind", "options"), [("flat", {}), ("ivf", {"nlist": 60, "nprobe": 3}), ("hnsw", {})])
def test_an_index_returns_the_same_neighbours_for_any_number_of_threads(kind, options):
    first = search(kind, **options)
    faiss.omp_set_num_threads(4)
    again = search(kind, **options)
    assert faiss.omp_get_max_threads() == 4
    assert torch.equal(first.indices, again.indices)
    torch.testing.assert_close(first.similarities, again.similarities)


def test_the_cells_depend_on_the_seed():
    indexes = [build("ivf", nlist=60, seed=seed) for seed in (0, 1)]
    one, two = (index.quantizer.reconstruct_n(0, 60) for index in indexes)
    assert not np.array_equal(one, two)


def test_a_cell_with_too_few_images_leaves_places_empty():
    neighbours = nearest(build("ivf", IMAGES[:40], nlist=20, nprobe=1), QUERIES[:9], 30)
    empty = neighbours.indices < 0
    assert empty.any()
    assert (neighbours.similarities[empty] == -torch.inf).all()
    assert neighbours.similarities[~empty].isfinite().all()


@pytest.mark.parametrize(
    ("kind", "options", "name"),
    [
        ("ivf", {"nprobe": 0}, "nprobe"), ("ivf", {"nlist": 4, "nprobe": 5}, "nprobe"), ("ivf", {"nlist": 41}, "nlist"),
        ("ivf", {"seed": -1}, "seed"), ("hnsw", {"links": 1}, "links"), ("hnsw", {"ef_search": 2.5}, "ef_search"),
        ("hnsw", {"ef_construction": 0}, "ef_construction"),
    ],
)  # fmt: skip
def test_options_of_an_index_are_refused_by_name(kind, options, name):
    with pytest.raises(OptionError) as error:
        build(kind, IMAGES[:40], **options)
    assert (error.value.name, error.value.value) == (name, options[name])


@pytest.mark.parametrize("count", [1, 2, 7, 5000])
def test_distances_are_relative_to_the_median_of_the_images(count):
    queries, images = clustered(5, seed=8), clustered(count, seed=9)
    neighbours = nearest(build("flat", images), queries, min(count, 3))
    distances = 1 - queries.double() @ images[:: -(-count // 4096)].double().T  # every second of 5,000
    median = distances.sort(1, descending=True).values[:, (distances.shape[1] - 1) // 2]
    expected = (1 - neighbours.similarities.double()) / median[:, None]
    assert np.allclose(relative_distances(neighbours, 3 * queries, 2 * images), expected, atol=1e-4)


def test_relative_distances_are_zero_for_copies_and_differ_where_cosines_hardly_do():
    copies = IMAGES[[4, 4, 4]]
    assert relative_distances(nearest(build("flat", copies), IMAGES[[4]], 3), IMAGES[[4]], copies).abs().max() < 1e-6
    shift = torch.zeros(16)
    shift[0] = 60.0
    images, queries = IMAGES[:200] + shift, QUERIES[:2] + shift
    unit = torch.nn.functional.normalize
    neighbours = nearest(build("flat", unit(images)), unit(queries), 5)
    assert len({f"{cosine:.3f}" for cosine in neighbours.similarities.flatten().tolist()}) == 1
    distances = relative_distances(neighbours, queries, images).flatten().tolist()
    assert len({f"{distance:.3f}" for distance in distances}) == 10
    assert all(0 < distance < 1 for distance in distances)
