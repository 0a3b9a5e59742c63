"""The pinned versions: complete and without contradiction, since otherwise pip tries every old version of a package."""

import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]


def required(first: list[str]) -> Iterator[Requirement]:
    """Return the transitive dependencies of the packages ``first`` from the installed metadata."""
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


def pinned(file: str) -> dict[str, str]:
    """The versions in a file of constraints, by the packages' names."""
    lines = (ROOT / file).read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in pins.items()}


def test_the_oldest_versions_are_the_lower_bounds():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    bounds = {
        canonicalize_name(requirement.name): specifier.version
        for requirement in map(Requirement, project["dependencies"])
        for specifier in requirement.specifier
        if specifier.operator == ">="
    }
    oldest = pinned("constraints-oldest.txt")
    assert oldest == {name: bounds[name] for name in oldest}
    assert bounds.keys() - oldest.keys() == {"jinja2", "numpy", "safetensors", "tqdm"}
    assert oldest.keys() >= {"torch", "torchvision", "lightly", "hydra-core"}


def test_every_package_that_the_tests_need_has_one_version_that_suits_all_others():
    """The constraints cover ``ssvit[dev]`` and all of its dependencies."""
    pins = pinned("constraints.txt")
    if any(metadata.version(name) != pins[name] for name in ("torch", "pydantic")):
        pytest.skip("needs the environment of constraints.txt, since the metadata of installed packages are read")
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
