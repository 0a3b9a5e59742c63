"""Declare options; their checks, error messages and help are derived from the declaration. No torch.

A class of options is a pydantic model in a module that does not import torch. `ssvit.choices` lists the code that each
configures. An option is declared once, with its type, its range or choices, its default and a sentence below it.
"""

import ast
import difflib
import inspect
import os
import re
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, TypeVar, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Len, MinLen, Predicate
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    SerializeAsAny,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from ssvit.choices import code_of, options_of
from ssvit.config.dotted import at
from ssvit.config.filling import is_taken
from ssvit.errors import MISSING, OptionError, pair, typed, within


class Options(BaseModel):
    """Base class of the options of a part.

    Raises:
        OptionError: An option is unknown, missing or outside its type, or the values contradict each other
            (`check_consistency`). Names of nested options are relative to this class.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, validate_default=False, protected_namespaces=()
    )

    if not TYPE_CHECKING:  # type checkers and editors derive the parameters from the options

        def __init__(self, **values: Any) -> None:
            values.pop("_part_", None)  # the name of the part in YAML
            try:
                super().__init__(**values)
            except ValidationError as error:
                raise _option_error(type(self), error, values) from None

    @model_validator(mode="after")
    def _verified(self) -> Self:
        if all(getattr(self, name) is not None for name in filled(type(self))):
            self.check_consistency()
        return self

    def check_consistency(self) -> None:
        """Check the options against each other, once all have a value and each has been validated.

        Raises:
            OptionError: Two options contradict each other.
        """

    also: ClassVar[Mapping[str, str]] = {}
    """Choices that this choice makes in other groups, such as {"/target": "mean_color"}."""
    sets: ClassVar[Mapping[str, Any]] = {}
    """Options of other groups that this choice sets, such as {"encoder": {"pooling": "patch_mean"}}."""

    def values(self) -> dict[str, Any]:
        """Return the options as plain data, with nested options as dictionaries."""
        return self.model_dump()

    def changed(self, **changes: Any) -> Self:
        """Return a copy with other values, which are validated."""
        return type(self)(**{**{name: getattr(self, name) for name in self.model_fields_set}, **changes})

    def build(self, **objects: object) -> Any:
        """Build the part that these options describe: call it with the options and with other objects that it needs.

        Args:
            objects: Arguments of the constructor in addition to the options, such as an encoder.
        """
        return code_of(type(self))(self, **objects)

    def build_part(self, name: str, /, **objects: object) -> Any:
        """Build the part whose options have a dotted name below these, such as data.augment, which errors contain."""
        with within(name):
            return at(self, name).build(**objects)

    def loaded(self) -> "Options | None":
        """Return the options of the part in a checkpoint if these options load one; None otherwise."""
        return None

    def origins(self, option: str) -> list[dict[str, str]]:
        """Return rows about the weights that this part loads, see `ssvit.loading.origins.origin`; usually none.

        Args:
            option: Dotted name of this part.
        """
        return []

    def check(self, tree: "Tree") -> None:
        """Check that this part is compatible with all parts of a run, before torch is imported.

        Args:
            tree: The validated options of all parts of the command. A part that is None is unknown and is not checked.

        Raises:
            OptionError: An option of this part does not fit the other parts; its name is relative to this part.
            RootOptionError: An option of another part does not fit this one; its name is relative to the root.
        """


class Tree:
    """Provide the options of a run, against which each part checks its requirements.

    A part that the command does not have is None and is not checked.

    Args:
        options: The options of a command.

    Attributes:
        options: The options of the command.
        objective: Options of the objective.
        data: Options of the data set.
        augment: Options of the augmentation of training images.
        recipe: Hyperparameters of the training, a `ssvit.training.recipe.Recipe`.
        subset: Options that select a subset of the training images.
        launch: Options of devices and processes.
        development: Part of the data that replaces the test images; None: the test images are used.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self.objective: Options | None = at(options, "objective")
        self.data: Options | None = at(options, "data")
        self.augment: Options | None = at(options, "data.augment")
        self.recipe: Any = at(options, "recipe")
        self.subset: Options | None = at(options, "subset")
        self.launch: Options | None = at(options, "launch")
        self.development: float | str | None = at(options, "development")

    def check(self) -> None:
        """Check the requirements of all parts; raise OptionError or UserError if they do not fit."""
        _ = self.encoder
        self.options.check(self)
        # Evaluators last: errors in options that they refer to must have the names that the user typed.
        for name, part in sorted(parts(self.options), key=lambda item: item[0].startswith("evaluators.")):
            with within(name):
                part.check(self)

    @cached_property
    def encoder(self) -> Options | None:
        """Return the options of the encoder; those in the checkpoint if it is loaded from one."""
        options = at(self.options, "encoder")
        with within("encoder"):
            return options and (options.loaded() or options)

    @property
    def from_checkpoint(self) -> bool:
        """Return whether training starts from the weights of a checkpoint."""
        return self.encoder is not at(self.options, "encoder")


def parts(options: Options, name: str = "") -> Iterator[tuple[str, Options]]:
    """Yield nested options at any depth with their dotted names."""
    for key, value in options:
        nested = {f".{inner}": part for inner, part in value.items()} if isinstance(value, Mapping) else {"": value}
        for inner, part in nested.items():
            if isinstance(part, Options):
                full = f"{name}.{key}{inner}" if name else f"{key}{inner}"
                yield full, part
                yield from parts(part, full)


@cache
def filled(options: type[Options]) -> tuple[str, ...]:
    """Return the options that are `FILLED` by default: their types do not permit None."""
    fields = options.model_fields.items()
    return tuple(
        name
        for name, field in fields
        if field.default is None and field.annotation is not Any and not _is_optional(field.annotation)
    )


T = TypeVar("T", bound=Options)
FILLED: Any = None
"""Default of an option that has no value until `ssvit.config.filling` or the composed files set it."""


@dataclass(frozen=True)
class Expect:
    """Description of the permitted values of a type that cannot be derived from its annotation."""

    text: str


def among(choices: Collection[str]) -> tuple[Predicate, Expect]:
    """Permit a choice among computed names, as Annotated[str, *among(NAMES)]; for literal names, use `Literal`."""
    return Predicate(choices.__contains__), Expect(f"one of {', '.join(choices)}")


def _read_part(value: object) -> object:
    """Convert plain data to the options of the part that `_part_` names."""
    if value is None or isinstance(value, Options):
        return value
    if not isinstance(value, Mapping):
        raise ValueError
    if (part := value.get("_part_")) is None:
        return value
    if (options := options_of(part)) is None:
        raise OptionError("", part, "must be a part in the table of ssvit.choices, or one that --plugin adds")
    return options(**value)


def _chosen(parts: object) -> object:
    """Return the parts that are not null; options of parts that are not chosen have no `_part_`."""
    if not isinstance(parts, Mapping):
        return parts
    if not all(part is None or isinstance(part, Options | Mapping) for part in parts.values()):
        raise ValueError
    return {name: part for name, part in parts.items() if isinstance(part, Options) or (part and "_part_" in part)}


def select(options: type[T], values: Mapping[str, Any]) -> T:
    """Return options of a class from a mapping that may contain additional entries."""
    return options(**{name: value for name, value in values.items() if name in options.model_fields})


def completed(node: Mapping[str, Any], groups: Mapping[str, type[Options]], name: str = "") -> dict[str, Any]:
    """Add the defaults of missing options to nested groups of options; ??? for those that have no default.

    If an option has a dictionary as its default, missing entries are taken from it, otherwise from the class of the
    nested options.

    Args:
        node: Options as plain data. The class of a group is the class of its `_part_`.
        groups: Classes of groups without `_part_` by name; "" for the root.
        name: Dotted name of `node` from the root.
    """
    path = f"{name}." if name else ""
    options = options_of(node.get("_part_")) or groups.get(name)
    full = {str(key): value for key, value in node.items()} if options else dict(node)
    fields = options.model_fields if options else {}
    for key, field in fields.items():
        declared = MISSING if is_taken(f"{path}{key}") or key in filled(options) else default(field)
        value = full.setdefault(key, declared)
        if isinstance(declared, Mapping) and isinstance(value, Mapping) and "_part_" not in value:
            full[key] = {**declared, **value}
    nested = {f"{path}{key}": nested_options(field.annotation, field.metadata) for key, field in fields.items()}
    classes = {**groups, **{key: options for key, options in nested.items() if options}}
    return {
        key: completed(value, classes, f"{path}{key}") if isinstance(value, Mapping) else value
        for key, value in full.items()
    }


def default(field: FieldInfo) -> object:
    """Return the default of an option as in a YAML file; ??? if it is required."""
    if field.is_required():
        return MISSING
    return to_jsonable_python(field.get_default(call_default_factory=True, validated_data={}))


def _option_error(options: type[Options], error: ValidationError, values: Mapping[str, object]) -> OptionError:
    """Translate pydantic's errors into one OptionError, for an unknown option if any, otherwise for the first error."""
    errors = error.errors(include_url=False)
    names = list(options.model_fields)
    unknown = [str(details["loc"][0]) for details in errors if details["type"] == "extra_forbidden"]
    if unknown:
        close = difflib.get_close_matches(unknown[0], names, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(names)}"
        return OptionError(unknown[0], values[unknown[0]], f"there is no such option; {hint}")
    for details in errors:
        cause = details.get("ctx", {}).get("error")
        if isinstance(cause, OptionError):  # from nested options, or from a check of several options
            of_several = len(details["loc"]) > 1 and isinstance(values.get(str(details["loc"][0])), Mapping)
            name = ".".join([*map(str, details["loc"][: 1 + of_several]), *([cause.name] if cause.name else [])])
            value = values.get(name, cause.value) if cause.name else cause.value
            is_item = isinstance(value, list | tuple) and not isinstance(cause.value, list | tuple)
            is_parsed = isinstance(value, str) and isinstance(cause.value, list)  # a list that was typed as x,y
            return OptionError(name, cause.value if is_item or is_parsed else value, cause.expectation)
    name = str(errors[0]["loc"][0])
    annotation, metadata = options.model_fields[name].annotation, options.model_fields[name].metadata
    if errors[0]["type"] == "missing" and len(errors[0]["loc"]) == 1:
        return required(name, options.model_fields[name])
    if (nested := nested_options(annotation)) and not _is_optional(annotation):
        first = next(iter(nested.model_fields), "option")
        return OptionError(name, values[name], f"is a group of options: set one of them, such as {first}")
    return OptionError(name, values[name], f"must be {expected(annotation, metadata)}")


def required(name: str, field: FieldInfo | None) -> OptionError:
    """Return the error for an option that has neither a value nor a default; its declaration may be unknown."""
    values = "a text" if field is None else expected(field.annotation, field.metadata)
    return OptionError(name, MISSING, f"has no default and must be set{'' if values == 'a text' else f', {values}'}")


def nested_options(annotation: Any, metadata: Sequence[object] = ()) -> type[Options] | None:
    """Return the class of options in the type of an option, which may also permit null; None for other types."""
    if _READ in metadata:  # a part, whose class is that of its value
        return None
    for item in metadata:
        if (options := getattr(item, "options", None)) is not None:
            return options
    types_ = [item for item in get_args(annotation) if item is not NoneType] if _is_union(annotation) else [annotation]
    first = types_[0]
    return first if len(types_) == 1 and isinstance(first, type) and issubclass(first, Options) else None


def _is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, UnionType)


def _is_optional(annotation: Any) -> bool:
    return _is_union(annotation) and NoneType in get_args(annotation)


def expected(annotation: Any, metadata: Sequence[object] = ()) -> str:
    """Describe the permitted values of a type for error messages and `--help`, such as "a whole number, 1 or more".

    Args:
        annotation: The type of an option, with or without `Annotated`.
        metadata: Metadata of `Annotated` or `Field`: limits, `Expect`.
    """
    for item in metadata:
        if isinstance(item, Expect):
            return item.text
    if get_origin(annotation) is Annotated:
        argument, *more = get_args(annotation)
        return expected(argument, [*more, *metadata])
    if _is_union(annotation):
        alternatives = [expected(argument, metadata) for argument in get_args(annotation) if argument is not NoneType]
        return ", or ".join([*dict.fromkeys(alternatives), *(["null"] if _is_optional(annotation) else [])])
    if get_origin(annotation) is Literal:
        choices = list(map(typed, get_args(annotation)))
        return f"one of {', '.join(choices)}" if len(choices) > 1 else choices[0]
    if nested := nested_options(annotation, metadata):
        needed = [f"{name}: …" for name, field in nested.model_fields.items() if field.is_required()]
        return f"{{{', '.join(needed or list(nested.model_fields)[:1])}}}"
    if annotation in (int, float):
        return _range("a whole number" if annotation is int else "a number", metadata)
    if get_origin(annotation) is not None:
        (argument, *_) = get_args(annotation) or (Any,)
        if issubclass(get_origin(annotation), Mapping):
            return "{name: value, …}"
        return f"a list, each {expected(argument)}"
    return {bool: "true or false", str: "a text", Path: "a path"}.get(annotation, "another value")


def _range(noun: str, metadata: Sequence[object]) -> str:
    lower = upper = ""
    for limit in metadata:
        if isinstance(limit, Ge):
            lower = f", {limit.ge:g} or more"
        elif isinstance(limit, Gt):
            lower = f", above {limit.gt:g}"
        elif isinstance(limit, Le):
            upper = f" and at most {limit.le:g}"
    return f"{noun}{lower}{upper if lower else upper.replace(' and', ',')}"


@cache
def meanings(options: type[Options]) -> dict[str, str]:
    """Return the sentence below each option of a class, including inherited options."""
    descriptions = {}
    for base in reversed(options.__mro__):
        if not issubclass(base, Options) or base is Options:
            continue
        with suppress(OSError):  # no source
            (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
            assert isinstance(tree, ast.ClassDef)
            for field, below in zip(tree.body, tree.body[1:], strict=False):
                if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
                    meaning = str(ast.literal_eval(below.value))
                    descriptions[ast.unparse(field.target)] = re.sub(r"\bNone\b", "null", " ".join(meaning.split()))
    return descriptions


def _listed(value: object) -> tuple[object, ...]:
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def _path(value: object) -> object:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _pair(value: object) -> object:
    pair("", value)
    return value


def _different(values: Sequence[object]) -> Sequence[object]:
    if len(set(values)) < len(values):
        raise ValueError
    return values


def _rising(values: Sequence[float]) -> Sequence[float]:
    if values[0] > values[1]:
        raise OptionError("", values, "must be [minimum, maximum] with minimum <= maximum")
    return values


_UNITS = {"": 1, "s": 1, "min": 60, "h": 3600}


def _seconds(value: object) -> object:
    if (match := re.fullmatch(r"([\d.]+)\s*(s|min|h|)", str(value))) is None:
        raise ValueError
    return float(match[1]) * _UNITS[match[2]]


# Types of options.
Count = Annotated[int, Ge(1)]
Whole = Annotated[int, Ge(0)]
Positive = Annotated[float, Gt(0)]
Seconds = Annotated[Positive, BeforeValidator(_seconds), Expect("a number of seconds above 0, or as 90s, 6min, 1h")]
NotNegative = Annotated[float, Ge(0)]
Fraction = Annotated[float, Ge(0), Le(1)]
Share = Annotated[float, Gt(0), Le(1)]  # a fraction above 0
Name = Annotated[str, BeforeValidator(lambda value: str(value) if type(value) is int else _path(value))]
"""A name or a path. Values of digits only are accepted, which YAML reads as numbers."""
Runs = Annotated[str, MinLen(1), Expect("the folder of all runs")]
_READ = BeforeValidator(_read_part)
_Class = TypeVar("_Class")
Part = Annotated[_Class, _READ, SerializeAsAny(), Expect("a group of options")]
"""Options of a part, whose class derives from a class: Part[Objective]."""
Parts = Annotated[Mapping[str, Part[_Class]], BeforeValidator(_chosen)]
"""Options of several parts by name, which derive from a class: Parts[Options]; parts that are null are removed."""
Text = Annotated[str, MinLen(1), Expect("a text")]
Figures = Literal["end", "each", "none"]  # when figures are drawn
_PIXELS = Expect("a whole number of pixels, 1 or more, or [height, width]")
Size = Annotated[int | Sequence[int], AfterValidator(_pair), _PIXELS]
Pair = Annotated[tuple[int, int], BeforeValidator(lambda value: pair("", value)), _PIXELS]
"""As `Size`, converted to (height, width)."""
Distinct = AfterValidator(_different)
"""Validator for a list of distinct values."""
Different = Annotated[Sequence[Positive], Distinct, MinLen(1), Expect("a list of different numbers")]
ONE_OR_SEVERAL = BeforeValidator(_listed), MinLen(1)
"""Validators for a tuple that accepts a single value."""
Counts = Annotated[
    tuple[Count, ...],
    *ONE_OR_SEVERAL,
    AfterValidator(lambda counts: tuple(sorted(set(counts)))),
    Expect("a whole number, 1 or more, or a list of them"),
]
_LIMITS = Len(2, 2), AfterValidator(_rising)
Limits = Annotated[Sequence[Positive], *_LIMITS, Expect("two numbers above 0, [least, most]")]
ShareLimits = Annotated[Sequence[Share], *_LIMITS, Expect("two numbers above 0 and at most 1, [least, most]")]
