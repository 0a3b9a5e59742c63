"""Retrieval: indexes against a plain search, measures against plain Python, and the sheet of pictures."""

import io

import faiss
import numpy as np
import pytest
import torch
from PIL import Image

from ssvit.data.sources.synthetic import render
from ssvit.evaluation.neighbours import HNSW, IVF, Flat, Neighbours, nearest, recall, relative_distances
from ssvit.evaluation.probes.retrieval import average_precisions, measure
from ssvit.figures.contact_sheet import Neighbour, Query, contact_sheet
from ssvit.figures.display import PLAIN
from ssvit.options import OptionError, UserError


@pytest.fixture(autouse=True)
def one_thread():
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    yield
    faiss.omp_set_num_threads(before)


def unit(vectors: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(vectors.double()).float()


def clustered(count: int, *, seed: int, width: int = 16, clusters: int = 40) -> torch.Tensor:
    """Images of some kinds: clusters that overlap a little, the same ones for every seed."""
    centres = torch.randn(clusters, width, generator=torch.Generator().manual_seed(99))
    generator = torch.Generator().manual_seed(seed)
    of = torch.randint(clusters, (count,), generator=generator)
    return unit(centres[of] + 0.4 * torch.randn(count, width, generator=generator))


def build(bank: torch.Tensor, kind: str = "flat", **options) -> faiss.Index:
    return {"flat": Flat, "ivf": IVF, "hnsw": HNSW}[kind](**options).over(bank)


BANK, QUERIES = clustered(3000, seed=1), clustered(100, seed=2)


def plain_order(query: list[float], bank: list[list[float]], own: int = -1) -> list[int]:
    similarity = [sum(a * b for a, b in zip(query, row, strict=True)) for row in bank]
    return sorted((i for i in range(len(bank)) if i != own), key=lambda i: (-similarity[i], i))


@pytest.mark.parametrize("kind", ["ivf", "hnsw"])
def test_approximate_indexes_find_most(kind):
    exact = nearest(build(BANK), QUERIES, 10)
    quick = nearest(build(BANK, kind), QUERIES, 10)
    shared = [len(set(a) & set(b)) / 10 for a, b in zip(quick.indices.tolist(), exact.indices.tolist(), strict=True)]
    assert sum(shared) / len(shared) > 0.9
    assert recall(quick, exact) == pytest.approx(sum(shared) / len(shared))


def test_looking_harder_finds_more_and_everywhere_all():
    exact = nearest(build(BANK), QUERIES, 10)
    recalls = [recall(nearest(build(BANK, "ivf", nlist=60, nprobe=n), QUERIES, 10), exact) for n in (1, 4, 60)]
    assert recalls[0] < recalls[1] <= recalls[2] == 1
    recalls = [
        recall(nearest(build(BANK, "hnsw", links=4, ef_construction=8, ef_search=n), QUERIES, 10), exact)
        for n in (10, 400)
    ]
    assert recalls[0] < recalls[1]


@pytest.mark.parametrize(("kind", "options"), [("flat", {}), ("ivf", {"nlist": 60, "nprobe": 3}), ("hnsw", {})])
def test_the_same_answers_again(kind, options):
    first, again = (nearest(build(BANK, kind, **options), QUERIES, 10) for _ in range(2))
    assert torch.equal(first.indices, again.indices)
    assert torch.equal(first.similarities, again.similarities)


def test_the_graph_is_the_same_for_any_number_of_threads():
    def answers(threads):
        faiss.omp_set_num_threads(threads)
        index = build(BANK, "hnsw", links=4, ef_construction=8, ef_search=10)
        assert faiss.omp_get_max_threads() == threads
        return nearest(index, QUERIES, 10).indices

    assert torch.equal(answers(1), answers(4))


def test_another_seed_makes_other_cells():
    one, two = (build(BANK, "ivf", nlist=60, seed=seed) for seed in (0, 1))
    assert not np.array_equal(one.quantizer.reconstruct_n(0, 60), two.quantizer.reconstruct_n(0, 60))


def test_a_cell_with_too_few_images_leaves_places_empty():
    answer = nearest(build(BANK[:40], "ivf", nlist=20, nprobe=1), QUERIES[:9], 30)
    empty = answer.indices < 0
    assert empty.any()
    assert (answer.similarities[empty] == -torch.inf).all()
    assert answer.similarities[~empty].isfinite().all()
    assert recall(answer, nearest(build(BANK[:40]), QUERIES[:9], 30)) == pytest.approx(1 - empty.double().mean().item())


def test_equals_count_as_found_whichever_is_returned():
    exact = Neighbours(torch.tensor([[0.9, 0.5]]), torch.tensor([[3, 1]]))
    assert recall(Neighbours(torch.tensor([[0.9, 0.5]]), torch.tensor([[3, 8]])), exact) == 1
    assert recall(Neighbours(torch.tensor([[0.9, 0.4]]), torch.tensor([[3, 1]])), exact) == 0.5


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("ivf", {"nprobe": 0}, "nprobe=0"),
        ("ivf", {"nlist": 4, "nprobe": 5}, "nprobe=5: .*4"),
        ("ivf", {"nlist": 41}, "nlist=41: .*40"),
        ("ivf", {"seed": -1}, "seed=-1"),
        ("hnsw", {"links": 1}, "links=1"),
        ("hnsw", {"ef_search": 2.5}, "ef_search=2.5"),
        ("hnsw", {"ef_construction": 0}, "ef_construction=0"),
    ],
)
def test_an_index_that_cannot_be_is_refused(kind, options, message):
    with pytest.raises(OptionError, match=message):
        build(BANK[:40], kind, **options)


def plain_measures(ranking, query_labels, labels, own, ks):
    """By the definitions, in plain loops; also mAP over the whole ranking."""
    sums = {f"{name}@{k}": [] for name in ("recall", "precision", "map") for k in ks} | {"map": []}
    for row, order in enumerate(ranking):
        label = query_labels[row]
        r = sum(1 for i, other in enumerate(labels) if other == label and i != own[row])
        if label == -1 or r == 0:
            continue
        right = [labels[i] == label for i in order]

        def average(k, right=right, r=r):
            return sum(sum(right[: i + 1]) / (i + 1) for i in range(k) if right[i]) / min(k, r)

        for k in ks:
            sums[f"recall@{k}"].append(float(any(right[:k])))
            sums[f"precision@{k}"].append(sum(right[:k]) / k)
            sums[f"map@{k}"].append(average(k))
        sums["map"].append(average(len(right)))
    return {name: sum(values) / len(values) for name, values in sums.items()} | {"queries": len(sums["map"])}


@pytest.mark.parametrize("inside", [False, True], ids=["queries from elsewhere", "queries of the bank"])
def test_measures_are_those_of_a_plain_loop(inside, monkeypatch):
    monkeypatch.setattr("ssvit.evaluation.probes.retrieval._BLOCK", 500)  # a few queries at a time
    generator = torch.Generator().manual_seed(5)
    bank = clustered(120, seed=6)
    labels = torch.randint(-1, 9, (120,), generator=generator)
    labels[labels == 7] = 8
    labels[17] = 7  # the only one of its class
    own = torch.tensor([17, 3, -1, 60, 100, 5, 6, 7, 8, 9]) if inside else None
    queries = clustered(10, seed=7)
    query_labels = torch.tensor([7, 0, -1, 3, 8, 12, 1, 2, 0, 5])
    if inside:
        places = own.clamp(min=0)
        queries = torch.where((own >= 0)[:, None], bank[places], queries)
        query_labels = torch.where(own >= 0, labels[places], query_labels)
    left_out = own.tolist() if inside else [-1] * 10
    orders = [plain_order(q, bank.tolist(), o) for q, o in zip(queries.tolist(), left_out, strict=True)]
    ks = (1, 3, 20, 40)
    wanted = plain_measures(orders, query_labels.tolist(), labels.tolist(), left_out, ks)
    assert wanted["queries"] < 10
    answer = nearest(build(bank), queries, 40, own=own)
    got = measure(answer, query_labels, labels, own=own, ks=ks)
    got["map"] = average_precisions(queries, query_labels, bank, labels, own=own).mean().item()
    assert got == pytest.approx(wanted, rel=1e-12)


def test_places_left_empty_are_not_right():
    answer = Neighbours(torch.tensor([[0.9, -torch.inf]]), torch.tensor([[1, -1]]))
    got = measure(answer, torch.tensor([0]), torch.tensor([0, 0, 0]), ks=(2,))
    assert got == {"recall@2": 1, "precision@2": 0.5, "map@2": 0.5, "queries": 1}


def test_nothing_to_measure_is_said():
    answer = nearest(build(BANK[:5]), QUERIES[:2], 3)
    with pytest.raises(UserError, match="nothing to measure"):
        measure(answer, torch.tensor([-1, -1]), torch.full((5,), -1), ks=(1,))
    with pytest.raises(UserError, match="nothing to measure"):
        measure(answer, torch.tensor([3, 4]), torch.zeros(5, dtype=torch.int64), ks=(1,))
    with pytest.raises(OptionError, match="k=4: must be at most 3"):
        measure(answer, torch.tensor([0, 0]), torch.zeros(5, dtype=torch.int64), ks=(4,))


@pytest.mark.parametrize("count", [1, 2, 7, 5000])
def test_distances_are_relative_to_the_median_of_the_gallery(count):
    queries, bank = clustered(5, seed=8), clustered(count, seed=9)
    answer = nearest(build(bank), queries, min(count, 3))
    distances = 1 - queries.double() @ bank[:: -(-count // 4096)].double().T  # of 5,000 every second
    typical = distances.sort(1, descending=True).values[:, (distances.shape[1] - 1) // 2]
    expected = (1 - answer.similarities.double()) / typical[:, None]
    assert np.allclose(relative_distances(answer, 3 * queries, 2 * bank), expected, atol=1e-4)


def test_copies_in_a_gallery_of_copies_have_no_distance():
    answer = nearest(build(BANK[[4, 4, 4]]), BANK[[4]], 3)
    assert relative_distances(answer, BANK[[4]], BANK[[4, 4, 4]]).abs().max() < 1e-6


def test_captions_tell_neighbours_apart_whose_cosines_are_all_the_same_to_three_digits():
    shared = torch.zeros(16)
    shared[0] = 60.0
    bank, queries = BANK[:200] + shared, QUERIES[:2] + shared
    answer = nearest(build(unit(bank)), unit(queries), 5)
    assert len({f"{cosine:.3f}" for cosine in answer.similarities.flatten().tolist()}) == 1
    image = torch.zeros(3, 8, 8, dtype=torch.uint8)
    rows = [
        Query(image, "query", [Neighbour(image, distance) for distance in row])
        for row in relative_distances(answer, queries, bank).tolist()
    ]
    captions = [picture.captions[0] for row in contact_sheet(rows).rows for picture in row[1:]]
    assert len(captions) == len(set(captions)) == 10
    assert all(0 < float(text.removesuffix(" %")) < 100 for text in captions)


def pixels(figure) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(figure.png())).convert("RGB")).astype(int)


def near(picture: np.ndarray, color: tuple[int, int, int]) -> int:
    return int((np.abs(picture - np.array(color)).max(-1) < 12).sum())


def test_a_sheet_shows_the_images_whole_and_frames_by_what_is_known():
    colors = {"blue": (10, 20, 240), "yellow": (240, 240, 10), "pink": (240, 10, 240)}

    def plain(name, height, width):
        return torch.tensor(colors[name])[:, None, None].expand(3, height, width) / 255

    def sheet(right):
        return pixels(
            contact_sheet(
                [Query(plain("blue", 40, 40), "$sea_", [Neighbour(plain("yellow", 10, 60), 0.5, "", right),
                                                      Neighbour(plain("pink", 90, 30), 0.4, "", right)])]
            )
        )  # fmt: skip

    green, red = (58, 157, 93), (200, 55, 45)
    unknown, right, wrong = sheet(None), sheet(True), sheet(False)
    areas = [near(unknown, color) for color in colors.values()]
    assert areas[0] / areas[1] == pytest.approx(6, rel=0.1)
    assert areas[0] / areas[2] == pytest.approx(3, rel=0.1)
    # Frames hide nothing of the pictures.
    assert [near(right, color) for color in colors.values()] == areas
    assert near(unknown, green) == near(unknown, red) == 0
    assert near(right, green) > 1000 > near(right, red)
    assert near(wrong, red) > 1000 > near(wrong, green)


def test_a_sheet_has_its_limits():
    images = render(torch.arange(2), seed=0, size=16).images
    some = contact_sheet([Query(images[0], "a", [Neighbour(images[1], 1.0)] * 10)] * 8)
    more = contact_sheet([Query(images[0], "a", [Neighbour(images[1], 1.0)] * 12)] * 9)
    assert pixels(some).shape == pixels(more).shape
    grey = contact_sheet([Query(PLAIN(images[0, :1]), "grey", [])])
    assert pixels(grey).shape[0] < pixels(some).shape[0]
