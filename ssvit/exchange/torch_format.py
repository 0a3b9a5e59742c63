"""Files that torch.save writes, read as data: their pickles are followed opcode by opcode, and nothing is called.

Since torch 1.6 a file is a zip archive without compression: NAME/data.pkl holds the tensors' names and shapes, and
NAME/data/KEY the numbers of a storage. Before, it was five pickles, the fourth with the names and shapes and the fifth
with the storages' keys, and then each storage's count (8 bytes) and its numbers. No torch is needed.
"""

import io
import pickletools
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

# By a storage's class, the type of its numbers and their size in bytes.
KINDS = {
    "Float": ("float32", 4), "Double": ("float64", 8), "Half": ("float16", 2), "BFloat16": ("bfloat16", 2),
    "Long": ("int64", 8), "Int": ("int32", 4), "Short": ("int16", 2), "Char": ("int8", 1), "Byte": ("uint8", 1),
    "Bool": ("bool", 1), "ComplexFloat": ("complex64", 8), "ComplexDouble": ("complex128", 16),
}  # fmt: skip
_MAGIC = 0x1950A86A20F9469CFC6C
# Bounds on a file; an encoder of 1,000 layers with its optimiser stays far below them.
_LONGEST_PICKLE = 10_000_000  # bytes
_MOST_OPCODES = 1_000_000
_DEEPEST = 16  # dictionaries
_LONGEST_NAME = 256  # characters
_LARGEST = 2**63


class RefusedError(ValueError):
    """A file holds something that is not read, which the message names."""


@dataclass(frozen=True, slots=True)
class Storage:
    """`count` numbers of a type, one of `KINDS`, under a key."""

    key: str
    kind: str
    count: int


@dataclass(frozen=True, slots=True)
class Window:
    """A tensor: its place in a storage, counted in numbers."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Global:
    """The name of a class or a function, as "module name"."""

    name: str


def read(path: Path) -> tuple[dict[str, Window], dict[Storage, int]]:
    """The tensors of a file by their full names ({"model": {"norm": …}} as model.norm), and the byte at which each of
    their storages begins. Anything else in it is ignored.

    RefusedError names what is not read. ValueError, LookupError, TypeError, zipfile.BadZipFile or struct.error if the
    file is damaged.
    """
    with open(path, "rb") as file:
        zipped = file.read(4) == b"PK\x03\x04"
        file.seek(0)
        root, places = _read_zip(file) if zipped else _read_pickles(file)
        size = file.seek(0, io.SEEK_END)
    lengths = {storage: storage.count * KINDS[storage.kind][1] for storage in places}
    if sum(lengths.values()) > size or any(begin + lengths[storage] > size for storage, begin in places.items()):
        raise ValueError
    return _named(root), places


def _read_zip(file: BinaryIO) -> tuple[Any, dict[Storage, int]]:
    with zipfile.ZipFile(file) as archive:
        members = {member.filename: member for member in archive.infolist()}
        found = [name for name in members if name.endswith("/data.pkl") and name.count("/") == 1]
        if len(found) != 1 or len(members) != len(archive.infolist()):
            raise ValueError
        root = found[0].removesuffix("data.pkl")
        for member in members.values():
            if member.compress_type != zipfile.ZIP_STORED or member.flag_bits & 1:
                raise RefusedError(f"{member.filename!a} is compressed or encrypted, which torch never writes")
        if members[found[0]].file_size > _LONGEST_PICKLE:
            raise RefusedError(f"its pickle is longer than {_LONGEST_PICKLE:,} bytes")
        if (order := root + "byteorder") in members and archive.open(order).read(10) != b"little":
            raise RefusedError("its numbers are big-endian")
        value, storages = _follow(io.BytesIO(archive.read(found[0])))
        places = {}
        for storage in storages:
            member = members[f"{root}data/{storage.key}"]
            if member.file_size != storage.count * KINDS[storage.kind][1]:
                raise ValueError
            file.seek(member.header_offset)
            # A member's own header has 30 bytes, the last of which tell how long its name and what follows that are.
            places[storage] = member.header_offset + 30 + sum(struct.unpack("<26x2H", file.read(30)))
    return value, places


def _read_pickles(file: BinaryIO) -> tuple[Any, dict[Storage, int]]:
    head = io.BytesIO(file.read(_LONGEST_PICKLE))
    (magic, _), _, (system, _), (value, storages), (keys, _) = (_follow(head) for _ in range(5))
    if magic != _MAGIC:
        raise ValueError
    if not system["little_endian"]:
        raise RefusedError("its numbers are big-endian")
    by_key = {storage.key: storage for storage in storages}
    if len(by_key) != len(storages):
        raise ValueError
    places, place = {}, head.tell()
    for key in keys:
        storage = by_key[key]
        file.seek(place)
        if struct.unpack("<q", file.read(8)) != (storage.count,):
            raise ValueError
        places[storage] = place + 8
        place += 8 + storage.count * KINDS[storage.kind][1]
    if places.keys() != storages:
        raise ValueError
    return value, places


def _follow(file: BinaryIO) -> tuple[Any, set[Storage]]:
    """The next pickle of a file, with None for anything that is not plain data or a tensor; the tensors' storages."""
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, object] = {}
    storages: set[Storage] = set()
    for count, (code, given, _) in enumerate(pickletools.genops(file)):
        if count == _MOST_OPCODES:
            raise RefusedError(f"its pickle has more than {_MOST_OPCODES:,} opcodes")
        if code.name == "MARK":
            marks.append(len(stack))
            continue
        if code.name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
            memo[len(memo) if given is None else given] = stack[-1]
            continue
        # An opcode takes a fixed number of values, and some also all values above the last mark.
        start = len(stack) - len(code.stack_before)
        if pickletools.markobject in code.stack_before:
            start = marks.pop() - code.stack_before.index(pickletools.markobject)
        if start < (marks[-1] if marks else 0):
            raise ValueError
        taken = stack[start:]
        del stack[start:]
        match code.name:
            case "STOP":
                return taken[0], storages
            case "GET" | "BINGET" | "LONG_BINGET":
                assert given is not None
                value = memo[given]
            case "EMPTY_DICT" | "DICT":
                value = _set({}, taken)
            case "SETITEM" | "SETITEMS":
                value = _set(taken[0], taken[1:])
            case "EMPTY_LIST" | "LIST":
                value = taken
            case "APPEND" | "APPENDS":
                value = taken[0]
                if isinstance(value, list):
                    value += taken[1:]
            case "EMPTY_TUPLE" | "TUPLE" | "TUPLE1" | "TUPLE2" | "TUPLE3":
                value = tuple(taken)
            case "NEWTRUE" | "NEWFALSE":
                value = code.name == "NEWTRUE"
            case "GLOBAL" | "STACK_GLOBAL":
                value = _Global(given or " ".join(taken))
            case "BINPERSID":
                value = _storage(taken[0])
                storages.add(value)
            case "REDUCE":
                value = _made(*taken)
            case "BUILD":
                value = taken[0]
            case _:
                value = given
        if code.stack_after:
            stack.append(value)
    raise ValueError


def _set(target: object, pairs: list[object]) -> Any:
    if isinstance(target, dict):
        target |= {key: value for key, value in zip(pairs[::2], pairs[1::2], strict=True) if isinstance(key, str | int)}
    return target


def _storage(persistent: Any) -> Storage:
    label, kind, key, _, count, *view = persistent
    name = kind.name.removeprefix("torch ").removesuffix("Storage")
    if name not in KINDS:
        raise RefusedError(f"it holds a {kind.name!a}, and {', '.join(KINDS)} are read")
    if label != "storage" or not isinstance(key, str) or view not in ([], [None]):
        raise ValueError
    (size,) = _whole(count)
    return Storage(key, name, size)


def _made(function: Any, arguments: Any) -> Any:
    """What a call would make, if a tensor or a dictionary, else None; nothing is called."""
    match function:
        case _Global("collections OrderedDict"):
            return {}
        case _Global("torch._utils _rebuild_tensor_v2" | "torch._utils _rebuild_tensor"):
            storage, offset, shape, stride = arguments[:4]
            if not isinstance(storage, Storage) or len(shape) != len(stride):
                raise ValueError
            (start,) = _whole(offset)
            return Window(storage, start, _whole(*shape), _whole(*stride))
        case _Global("torch._utils _rebuild_parameter" | "torch._utils _rebuild_parameter_with_state"):
            return arguments[0]
        case _Global("torch._tensor _rebuild_from_type_v2"):
            return _made(arguments[0], arguments[2])
        case _Global(name) if name.startswith("torch._utils _rebuild"):
            raise RefusedError(f"it holds a tensor that {name.split()[1]!a} makes, and plain ones alone are read")
    return None


def _whole(*values: object) -> tuple[int, ...]:
    numbers = tuple(value for value in values if type(value) is int and 0 <= value < _LARGEST)
    if len(numbers) < len(values):
        raise ValueError
    return numbers


def _named(root: object) -> dict[str, Window]:
    """The tensors in nested dictionaries by their full names; each dictionary is entered once."""
    found: dict[str, Window] = {}
    entered: set[int] = set()
    waiting: list[tuple[tuple[str, ...], object]] = [((), root)]
    while waiting:
        keys, value = waiting.pop()
        if isinstance(value, Window):
            if sum(map(len, keys)) > _LONGEST_NAME:
                raise RefusedError(f"it holds a name of more than {_LONGEST_NAME} characters")
            name = ".".join(keys)
            last = value.offset + sum((n - 1) * step for n, step in zip(value.shape, value.stride, strict=True))
            if name in found or (0 not in value.shape and last >= value.storage.count):
                raise ValueError
            found[name] = value
        elif isinstance(value, Mapping) and id(value) not in entered:
            entered.add(id(value))
            if len(keys) == _DEEPEST:
                raise RefusedError(f"its dictionaries stand more than {_DEEPEST} deep in one another")
            waiting += [((*keys, str(key)), part) for key, part in reversed(list(value.items()))]
    return found
