"""Hashed random numbers: the published generator to the bit, functions of (seed, kind, slot, view), and uniform."""

import pytest
import torch

from ssvit.engine.randomness import bijection, key, permutation, uniform

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


def splitmix64(state: int, count: int) -> list[int]:
    """The generator as published (Steele, Lea, Flood 2014), in Python's unbounded integers."""
    numbers = []
    for _ in range(count):
        state = (state + GOLDEN) & MASK
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        numbers.append(z ^ (z >> 31))
    return numbers


def reference(seed: int, kind: str, slot: int, count: int) -> list[float]:
    """Slot t's stream starts at the t-th number of the stream of the key."""
    start = splitmix64((key(seed, kind) + (slot - 1) * GOLDEN) & MASK, 1)[0]
    return [(number >> 11) / 2**53 for number in splitmix64(start, count)]


def test_the_reference_is_splitmix64():
    assert splitmix64(1234567, 3) == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@pytest.mark.parametrize(("seed", "kind"), [(0, "flip"), (1, "crop"), (2**40, "corrupted patches"), (7, "")])
def test_bits_are_those_of_splitmix64(seed, kind):
    slots = [0, 1, 2, 1000, 2**31 - 1, 2**31, 2**40 + 3, 2**62 + 12345, 2**63 - 1]
    numbers = uniform(seed, kind, torch.tensor(slots), 9)
    assert numbers.dtype == torch.float64
    assert numbers.tolist() == [reference(seed, kind, slot, 9) for slot in slots]


def test_no_state_is_read_or_left_behind():
    before = torch.get_rng_state()
    first = uniform(0, "a", torch.arange(5), 5), permutation(0, "a", 50)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(123)
    again = uniform(0, "a", torch.arange(5), 5), permutation(0, "a", 50)
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])


def test_seeds_kinds_slots_views_and_places_are_independent():
    slots = torch.arange(20_000)
    samples = [uniform(seed, kind, slots, 1)[:, 0] for seed in (0, 1, 2) for kind in ("flip", "crop", "flip ")]
    samples += [uniform(0, "flip", slots + 1, 1)[:, 0], uniform(0, "flip", slots + 128, 1)[:, 0]]
    samples += [uniform(0, "flip", slots, 1, view)[:, 0] for view in (1, 2, 11)]
    samples += list(uniform(0, "places", slots, 4).T)
    correlation = torch.corrcoef(torch.stack(samples)).fill_diagonal_(0)
    assert correlation.abs().max() < 5 / len(slots) ** 0.5


def test_a_key_never_changes_and_that_of_the_first_view_is_that_of_no_view():
    assert key(3, "inception crop") == key(3, "inception crop", view=0) == 7550569952523396570


def test_keys_are_positive_integers_and_all_different():
    keys = [
        key(seed, kind, view) for seed in range(50) for kind in ("", "a", "b", "1", "/", "/1") for view in (0, 1, 11)
    ]
    assert len(set(keys)) == len(keys)
    assert all(0 <= number < 2**63 for number in keys)


@pytest.mark.parametrize("size", [0, 1, 2, 1000])
def test_a_permutation_has_everything_once(size):
    assert torch.equal(permutation(0, "order", size).sort().values, torch.arange(size))


def test_permutations_of_other_seeds_and_kinds_differ():
    orders = [permutation(seed, kind, 1000) for seed in (0, 1) for kind in ("epoch 0", "epoch 1")]
    for place, order in enumerate(orders):
        for other in orders[:place]:
            assert (order == other).sum() < 10


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 37, 1000, 1 << 12, (1 << 12) + 1])
def test_a_bijection_has_everything_once(size):
    assert torch.equal(bijection(3, "order", torch.arange(size), size).sort().values, torch.arange(size))


def test_a_bijection_is_a_feistel_network_walked_until_it_is_inside():
    """Compute the bijection by Python's integers: 1000 numbers in a network of 2 ** 10 with halves of five bits."""
    seed, kind, size = 5, "order of epoch 3", 1000

    def halves(number: int) -> int:
        parts = [number >> 5, number & 31]
        for turn in range(8):
            state = (key(seed, kind, turn) + (parts[1 - turn % 2] - 1) * GOLDEN) & MASK
            parts[turn % 2] ^= splitmix64(state, 1)[0] & 31
        return parts[0] << 5 | parts[1]

    def inside(number: int) -> int:
        number = halves(number)
        return number if number < size else inside(number)

    places = torch.tensor([0, 1, 17, 500, 999])
    assert bijection(seed, kind, places, size).tolist() == [inside(place) for place in places.tolist()]
