"""Files made to exhaust memory, to crash or to mislead are rejected in one line, within a bound of memory."""

import argparse
import io
import json
import os
import pathlib
import re
import struct
import subprocess
import sys
import types
import warnings
import zipfile

import numpy
import peers
import pytest
import tiny
import torch
from command import LIMIT
from safetensors.torch import save_file

from ssvit.errors import UserError
from ssvit.exchange import files, reading
from ssvit.exchange.files import ForeignError

MAX_GROWTH = 300  # MB more than before the first file
# Reads each file under a limit, and prints the message for each, the growth of memory, and which files loaded torch.
# The last is built as an encoder.
CHILD = """
import json, resource, sys, warnings
from pathlib import Path
import numpy.lib.format, safetensors
from ssvit.exchange import reading
from ssvit.errors import UserError
warnings.simplefilter("error")
*paths, wide = map(Path, sys.argv[1:])
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
before, messages, torch = peak(), {}, []
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
for path in paths:
    try:
        reading.read_foreign(path, {"heads": 4, "trained_size": [32, 56]})
        messages[path.name] = "read"
    except UserError as error:
        messages[path.name] = str(error)
    if "torch" in sys.modules:
        torch.append(path.name)
grown = peak() - before
from ssvit.loading.encoder import load_encoder
from ssvit.loading.options import LoadEncoder
try:
    load_encoder(LoadEncoder(path=wide, heads=4))
except UserError as error:
    print(json.dumps({"messages": messages, "grown": grown, "torch": torch, "wide": str(error)}))
"""


def weights():
    return {name: value.clone() for name, value in peers.of_timm().state_dict().items()}


def array(header, version=1):
    """An array's file: its header, and no numbers."""
    data = header if isinstance(header, bytes) else header.encode()
    return b"\x93NUMPY" + bytes([version, 0]) + struct.pack("<H" if version == 1 else "<I", len(data)) + data


def numbers(value):
    file = io.BytesIO()
    numpy.save(file, value)
    return file.getvalue()


def npz(path, **members):
    """The authors' arrays, some of their files replaced, all of them compressed."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, value in {**peers.arrays(), **members}.items():
            archive.writestr(f"{name}.npy", value if isinstance(value, bytes) else numbers(value))


def pickled(path, body):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", b"\x80\x02" + body)
        archive.writestr("a/version", "3\n")
        archive.writestr("a/byteorder", "little")


def safetensors(path, header, data=b""):
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)


def empty(*names):
    return json.dumps({name: {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for name in names}).encode()


def pth(path, **changes):
    torch.save({**weights(), **changes}, path)


def rewritten(path, compression=zipfile.ZIP_STORED, old=b"", new=b""):
    """A file of torch whose members are compressed, or have other bytes."""
    pth(path, **{"norm.weight": torch.zeros(70)})
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in members.items():
            archive.writestr(name, data.replace(old, new) if old else data)


def dictionaries(path):
    """2 ** 40 ways to one tensor."""
    value = {"leaf": torch.ones(1)}
    for _ in range(40):
        value = {"a": value, "b": value}
    torch.save(value, path)


def bomb(path):
    """A member of 256 MB in 256 kB."""
    npz(path, **{"head/kernel": header(f"({1 << 26},)") + bytes(1 << 28)})


def wide(path):
    """The width of the patch projection implies 19e9 weights, whereas the file contains 100,000."""
    width = 40_000
    changed = {name: torch.ones(1, 1) for name in weights() if not name.startswith("head")}
    changed |= {"patch_embed.proj.weight": torch.ones(width, 3, 1, 1), "pos_embed": torch.ones(1, 5, 1)}
    save_file(changed | {name: torch.ones(1, width) for name in ("norm.weight", "blocks.1.mlp.fc1.weight")}, path)


def header(shape, descr="<f4"):
    return array(f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {shape}, }}")


SUFFIXES = (".safetensors", ".npz", ".pth")
ATTACKS = {
    # Elements that are not stored in the file are not allocated.
    "expanded.pth": (lambda path: pth(path, **{"norm.weight": torch.zeros(1).expand(1 << 31)}), "norm.weight"),
    "compressed.pth": (lambda path: rewritten(path, zipfile.ZIP_DEFLATED), "data.pkl"),
    # A pickle with more numbers than the member of its storage.
    "overread.pth": (lambda path: rewritten(path, old=b"K\x46", new=b"J\0\0\0\x10"), ""),
    "claimed.npz": (lambda path: npz(path, cls=header(f"(1, 1, {1 << 31})")), "cls"),
    "bomb.npz": (bomb, "head/kernel"),
    # What calls, hashes or enters itself.
    "called.pth": (lambda path: pickled(path, b"c__builtin__\nbytearray\n\x8a\x05\0\0\0\0\x02\x85R."), "'bytearray'"),
    "hashed.pth": (lambda path: pickled(path, b"})" + b"\x85" * 200_000 + b"K\x01s."), "60,000"),
    "marks.pth": (lambda path: pickled(path, b"(" * 2_000_000 + b"."), "1,000,000"),
    "long.pth": (lambda path: pickled(path, b"N" * 11_000_000), "10,000,000"),
    "memo.pth": (lambda path: pickled(path, b"}r\xff\xff\xff\x7f."), ""),
    "graph.pth": (dictionaries, " 16 "),
    "name.pth": (lambda path: torch.save({"x" * 300: torch.ones(1)}, path), "xxx"),
    # Empty files and other content.
    **{f"empty{suffix}": (lambda path: path.touch(), "") for suffix in SUFFIXES},
    **{f"text{suffix}": (lambda path: path.write_bytes(b"nonsense" * 100), "") for suffix in SUFFIXES},
    "list.safetensors": (lambda path: safetensors(path, b"[1, 2, 3] "), ""),
    # Headers.
    "literal.npz": (lambda path: npz(path, cls=array("(" + "1," * 2_000_000 + ")", version=2)), ""),
    "parentheses.npz": (lambda path: npz(path, cls=array("(" * 60_000)), ""),
    "negative.npz": (lambda path: npz(path, cls=header("(-1, 1, 48)")), ""),
    "digits.npz": (lambda path: npz(path, cls=header("(9" + "9" * 4_000 + ",)")), "cls"),
    "magic.npz": (lambda path: npz(path, cls=b"nonsense" * 9), ""),
    "members.npz": (lambda path: npz(path, **{str(i): b"" for i in range(20_000)}), "20,000"),
    "object.safetensors": (lambda path: safetensors(path, b'{"a":' * 100_000), ""),
    "long.safetensors": (lambda path: safetensors(path, b" " * 11_000_000), "11,000,000"),
    "layers.safetensors": (lambda path: safetensors(path, empty(
        "patch_embed.proj.weight", "pos_embed", *(f"blocks.{i}.norm1.weight" for i in range(20_000)))),
        "blocks.0.attn.proj.bias"),
    "number.safetensors": (lambda path: safetensors(path, empty(
        "patch_embed.proj.weight", f"blocks.{'9' * 5_000}.norm1.weight")), "norm.bias"),
    # Tensors of other kinds.
    "sparse.pth": (lambda path: pth(path, **{"norm.weight": torch.ones(48).to_sparse()}), "_rebuild_sparse_tensor"),
    "names.safetensors": (lambda path: save_file(
        {**weights(), "evil\n\x1b[31m" + "x" * 5_000: torch.ones(1)}, path), r"evil\\n\\x1b"),
    # No files of weights.
    "folder.pth": (lambda path: path.mkdir(), ""),
    "pipe.pth": (os.mkfifo, ""),
    "loop.pth": (lambda path: path.symlink_to(path), ""),
}  # fmt: skip


@pytest.fixture(scope="module")
def read(tmp_path_factory):
    """Return the error for each file, from one process that reads all of them, with its time and memory."""
    folder = tmp_path_factory.mktemp("hostile")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns when it writes some of these files
        for name, (make, _) in ATTACKS.items():
            make(folder / name)
    wide(folder / "wide.safetensors")
    names = sorted(ATTACKS, key=lambda name: name.endswith(".pth"))  # torch reads these, so they come last
    child = [sys.executable, "-c", CHILD, *(str(folder / name) for name in [*names, "wide.safetensors"])]
    done = subprocess.run(child, capture_output=True, text=True, check=True, timeout=LIMIT)
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", ATTACKS)
def test_a_hostile_file_is_rejected_in_one_line(name, read):
    message = read["messages"][name]
    assert message.isprintable()
    assert len(message) < 500
    assert re.search(rf"/{name}: .*{ATTACKS[name][1]}", message), message


def test_memory_is_bounded_and_torch_is_imported_for_its_files_only(read):
    assert read["grown"] < MAX_GROWTH
    assert all(name.endswith(".pth") for name in read["torch"])


def load(path, **options):
    return tiny.loaded(path, **(options or peers.TOLD))


class Harm:
    """Create a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (self.path, "w"))


def test_no_code_in_a_file_is_executed(tmp_path):
    trace = tmp_path / "trace"
    torch.save({"model": Harm(str(trace))}, tmp_path / "harm.pth")
    numpy.savez(tmp_path / "harm.npz", **{**peers.arrays(), "cls": numpy.array([Harm(str(trace))], dtype=object)})
    for name in ("harm.pth", "harm.npz"):
        with pytest.raises(ForeignError):
            reading.read_foreign(tmp_path / name, peers.TOLD)
    assert not trace.exists()


def test_nothing_larger_than_the_file_is_built(read):
    assert re.search(r"patch_embed\.proj\.bias: .*\b1x1\b.*\b40000\b", read["wide"])


def test_parts_of_one_tensor_must_fit_together(tmp_path):
    name = "Transformer/encoderblock_0/MultiHeadDotProductAttention_1/key/kernel"
    npz(tmp_path / "parts.npz", **{name: numpy.ones((48, 4, 13), numpy.float32)})
    with pytest.raises(ForeignError, match="48, 4, 13"):
        load(tmp_path / "parts.npz")


def test_tensors_are_those_that_torch_reads_and_other_objects_are_ignored(tmp_path, monkeypatch):
    """Objects of classes whose module is not installed, and a dictionary that contains itself."""
    other = types.ModuleType("other")
    other.Config = type("Config", (), {"__module__": "other"})
    monkeypatch.setitem(sys.modules, "other", other)
    base, module = torch.arange(24.0).view(4, 6), torch.nn.Linear(3, 2)
    state = {
        "plain": base.clone(), "turned": base.t(), "part": base[1:3, 2:5], "shared": base, "scalar": torch.tensor(3.0),
        "parameter": torch.nn.Parameter(base + 1), "half": base.half(), "brain": base.bfloat16(),
        "double": base.double(), "with.dots": {"inner": base - 1}, "module": module.state_dict(),
    }  # fmt: skip
    expected = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    expected |= {f"module.{name}": value for name, value in module.state_dict().items()} | {"with.dots.inner": base - 1}
    state |= {"none": None, "list": [base, 1, "x"], "epoch": 7, "args": argparse.Namespace(path=pathlib.Path("x"))}
    state |= {"config": other.Config(), "best": numpy.float32(1), "self": state}
    torch.save(state, tmp_path / "x.pth")
    monkeypatch.delitem(sys.modules, "other")
    assert files.shapes(tmp_path / "x.pth") == {name: tuple(value.shape) for name, value in expected.items()}
    tensors = files.tensors(tmp_path / "x.pth", list(expected))
    assert all(torch.equal(tensors[name], value.float()) for name, value in expected.items())


@pytest.mark.parametrize(
    "content",
    ['{"a":' * 100_000, "[]", "[" * 100_000, '{"hidden_act": ["gelu"]}', '{"hidden_act": "quick_gelu"}',
     '{"image_size": {}}', '{"num_attention_heads": "four"}', '{"rope_theta": 10.0}', '{"use_gated_mlp": true}'],
)  # fmt: skip
def test_a_config_that_does_not_describe_a_vit_is_rejected(content, tmp_path):
    peer = peers.huggingface(tmp_path)
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError) as caught:
        reading.read_foreign(peer.path, {})
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 500
