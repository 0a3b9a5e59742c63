"""The pinned versions: complete and without contradiction, since otherwise pip tries every old version of a package."""

import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]


def required(first: list[str]) -> Iterator[Requirement]:
    """What the packages of ``first`` need, and what these need, by what is installed."""
    waiting, seen = [Requirement(text) for text in first], set()
    while waiting:
        requirement = waiting.pop()
        yield requirement
        key = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if key in seen:
            continue
        seen.add(key)
        for further in map(Requirement, metadata.requires(requirement.name) or []):
            extras = requirement.extras or {""}
            if further.marker is None or any(further.marker.evaluate({"extra": extra}) for extra in extras):
                waiting.append(further)


def test_every_package_that_the_tests_need_has_one_version_that_suits_all_others() -> None:
    """Of ``ssvit[dev]`` and all that it brings."""
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines()[1:])
    pins = {canonicalize_name(name): version for name, version in pins.items()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = list(required(project["dependencies"] + project["optional-dependencies"]["dev"]))
    assert len(found) > 100
    assert {r.name for r in found if canonicalize_name(r.name) not in pins} == set()
    refused = [
        f"{r} does not take {pins[canonicalize_name(r.name)]}"
        for r in found
        if not r.specifier.contains(pins[canonicalize_name(r.name)], prereleases=True)
    ]
    assert refused == []
