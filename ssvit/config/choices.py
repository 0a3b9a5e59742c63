"""Declare the choices of groups of options in Python, next to the options of each choice. No Hydra.

A choice such as objective=mae is the name of a class of options. A YAML file of that name is needed only for settings
that the class cannot declare: other values of the same class, or values of several groups.
"""

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

from ssvit.config.declaration import Options
from ssvit.groups import GROUPS, Group


@dataclass(frozen=True)
class Choice:
    """A choice of a group of options.

    Attributes:
        group: The group, such as objective.
        name: Name of the choice, such as mae.
        options: Class of its options, which describes the part of the same name in the module next to it.
        also: Choices that it makes in other groups, such as {"/target": "mean_color"}.
        sets: Options of other groups that it sets, such as {"encoder": {"pooling": "patch_mean"}}.
    """

    group: str
    name: str
    options: type[Options]
    also: Mapping[str, str]
    sets: Mapping[str, Any]

    @property
    def node(self) -> dict[str, Any]:
        """Return the node that Hydra composes."""
        options: dict[str, Any] = {"_target_": self.options.part_name()}
        group = _group(self.group)
        if key := self.name if group.several else group.key:
            options = {key: options}
        if not (self.sets or self.also):
            return options
        values = {**self.sets, self.group: {**options, **self.sets.get(self.group, {})}}
        return {"defaults": [*({group: name} for group, name in self.also.items()), "_self_"], **values}

    @property
    def package(self) -> str | None:
        """Return where Hydra places the node: at the root if it sets options of other groups; None for its group."""
        return "_global_" if self.sets or self.also else None


_CHOICES: dict[tuple[str, str], Choice] = {}
Class = TypeVar("Class", bound=type[Options])


def choice(
    group: str, name: str, *, also: Mapping[str, str] | None = None, sets: Mapping[str, Any] | None = None
) -> Callable[[Class], Class]:
    """Declare a class of options as a choice of a group.

    Args:
        group: The group, such as objective.
        name: Name of the choice, such as mae.
        also: Choices that it makes in other groups.
        sets: Options of other groups that it sets.
    """

    def declare(options: Class) -> Class:
        _CHOICES[group, name] = Choice(group, name, options, also or {}, sets or {})
        return options

    return declare


def name_of(group: str, options: type[Options]) -> str | None:
    """Return the name of the choice of a group that has a class of options; None if it is not declared."""
    declared = ((name, choice) for (choice_group, name), choice in _CHOICES.items() if choice_group == group)
    return next((name for name, choice in declared if choice.options is options), None)


def _group(name: str) -> Group:
    return GROUPS.get(name, Group())


def is_group(name: str) -> bool:
    """Return whether choices of a group of this name are declared."""
    return _group(name).package is not None or any(group == name for group, _ in _CHOICES)


def declared(group: str) -> Iterator[Choice]:
    """Return the choices of a group that are declared in ssvit or in imported modules."""
    if package := _group(group).package:
        import_options(package)
    return (choice for choice in _CHOICES.values() if choice.group == group)


def of_plugins() -> list[tuple[str, str]]:
    """Return the groups and names of the choices that other packages declare."""
    return [key for key, choice in _CHOICES.items() if not choice.options.__module__.startswith("ssvit.")]


def lookup(group: str, name: str) -> Choice | None:
    """Return the choice of a group with a name; None if there is none.

    Modules that declare options are imported until one declares it, NAME_options first.
    """
    if (group, name) not in _CHOICES and (package := _group(group).package):
        for module in sorted(_modules(package), key=lambda module: not module.endswith(f".{name}_options")):
            importlib.import_module(module)
            if (group, name) in _CHOICES:
                break
    return _CHOICES.get((group, name))


@cache
def import_options(package: str) -> None:
    """Import the modules *_options of a package, which declare options; raise ImportError if it does not exist."""
    for module in _modules(package):
        importlib.import_module(module)


@cache
def _modules(package: str) -> list[str]:
    folder = importlib.import_module(package)
    names = (module.name for module in pkgutil.iter_modules(folder.__path__))
    return [f"{package}.{name}" for name in names if name.endswith("_options")]
