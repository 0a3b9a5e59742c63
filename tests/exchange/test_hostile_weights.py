"""Foreign files made to exhaust, crash or mislead: one clear line, in little time and memory."""

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
import torch
from safetensors.torch import save_file

from ssvit.exchange import files, reading
from ssvit.exchange.files import ForeignError
from ssvit.loading import encoder as loading
from ssvit.loading import encoder_options as loading_options
from ssvit.options import UserError

MOST = 300  # MB more than before the first file
# Reads each file under a limit, and prints what it says of each, its memory at the most, and whether torch was loaded.
CHILD = """
import json, resource, sys, warnings
from pathlib import Path
import numpy.lib.format, safetensors
from ssvit.exchange import reading
from ssvit.options import UserError
warnings.simplefilter("error")
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
before, said, torch = peak(), {}, []
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
for path in map(Path, sys.argv[1:]):
    try:
        reading.read(path, {"heads": 4, "trained_size": [32, 56]})
        said[path.name] = "read"
    except UserError as error:
        said[path.name] = str(error)
    if "torch" in sys.modules:
        torch.append(path.name)
print(json.dumps({"said": said, "grown": peak() - before, "torch": torch}))
"""


def weights():
    return {name: value.clone() for name, value in peers.of_timm().state_dict().items()}


def array(header, version=1):
    """An array's file: its header, and no numbers."""
    data = header if isinstance(header, bytes) else header.encode()
    return b"\x93NUMPY" + bytes([version, 0]) + struct.pack("<H" if version == 1 else "<I", len(data)) + data


def numbers(value, **options):
    file = io.BytesIO()
    numpy.save(file, value, **options)
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


def pth(path, old=False, **changes):
    torch.save({**weights(), **changes}, path, _use_new_zipfile_serialization=not old)


def recompressed(path):
    pth(path, **{"norm.weight": torch.zeros(1 << 20)})
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)


def encrypted(path):
    numpy.savez(path, **peers.arrays())
    data = bytearray(path.read_bytes())
    data[6] |= 1
    data[data.index(b"PK\x01\x02") + 8] |= 1
    path.write_bytes(data)


def twice(path):
    with warnings.catch_warnings(), zipfile.ZipFile(path, "w") as archive:
        warnings.simplefilter("ignore")
        for _ in range(2):
            archive.writestr("cls.npy", numbers(numpy.ones(3)))


def dictionaries(path):
    """2 ** 40 ways to one tensor."""
    value = {"leaf": torch.ones(1)}
    for _ in range(40):
        value = {"a": value, "b": value}
    torch.save(value, path)


def bomb(path):
    """A member of 256 MB in 256 kB."""
    npz(path, **{"head/kernel": header(f"({1 << 26},)") + bytes(1 << 28)})


def overread(path):
    """A pickle that names more numbers than its storage's member has."""
    torch.save({"patch_embed.proj.weight": torch.ones(70)}, path)
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data.replace(b"K\x46", b"J\0\0\0\x10"))


def header(shape, descr="<f4"):
    return array(f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {shape}, }}")


ATTACKS = {
    # What is not there is not made.
    "expanded.pth": (lambda path: pth(path, **{"norm.weight": torch.zeros(1).expand(1 << 31)}), "more numbers than"),
    "old.pth": (lambda path: pth(path, True, **{"norm.weight": torch.zeros(1).expand(1 << 31)}), "more numbers than"),
    "compressed.pth": (recompressed, "compressed or encrypted"),
    "overread.pth": (overread, "is damaged"),
    "claimed.npz": (lambda path: npz(path, cls=header(f"(1, 1, {1 << 31})")), "more numbers than its"),
    "bomb.npz": (bomb, "more numbers than its .* head/kernel"),
    # What calls, hashes or enters itself.
    "called.pth": (lambda path: pickled(path, b"c__builtin__\nbytearray\n\x8a\x05\0\0\0\0\x02\x85R."), "'bytearray'"),
    "hashed.pth": (lambda path: pickled(path, b"})" + b"\x85" * 200_000 + b"K\x01s."), "60,000 tuples"),
    "marks.pth": (lambda path: pickled(path, b"(" * 2_000_000 + b"."), "more than 1,000,000 opcodes"),
    "long.pth": (lambda path: pickled(path, b"N" * 11_000_000), "longer than 10,000,000 bytes"),
    "memo.pth": (lambda path: pickled(path, b"}r\xff\xff\xff\x7f."), "with nothing"),
    "graph.pth": (dictionaries, "more than 16 deep"),
    "name.pth": (lambda path: torch.save({"x" * 300: torch.ones(1)}, path), "more than 256 characters"),
    # Headers.
    "literal.npz": (lambda path: npz(path, cls=array("(" + "1," * 2_000_000 + ")", version=2)), "is damaged"),
    "nested.npz": (lambda path: npz(path, cls=array("-" * 9_000 + "1")), "is damaged"),
    "parentheses.npz": (lambda path: npz(path, cls=array("(" * 60_000)), "is damaged"),
    "negative.npz": (lambda path: npz(path, cls=header("(-1, 1, 48)")), "is damaged"),
    "digits.npz": (lambda path: npz(path, cls=header("(9" + "9" * 4_000 + ",)")), "more numbers than"),
    "magic.npz": (lambda path: npz(path, cls=b"nonsense" * 9), "is damaged"),
    "objects.npz": (lambda path: npz(path, cls=numbers(numpy.array([{}]), allow_pickle=True)), "cls holds Python obj"),
    "encrypted.npz": (encrypted, "cls is encrypted"),
    "twice.npz": (twice, "holds cls twice"),
    "members.npz": (lambda path: npz(path, **{str(i): b"" for i in range(20_000)}), "members; at most 20,000"),
    "object.safetensors": (lambda path: safetensors(path, b'{"a":' * 100_000), "is damaged"),
    "list.safetensors": (lambda path: safetensors(path, b"[" * 5_000_000), "is damaged"),
    "long.safetensors": (lambda path: safetensors(path, b" " * 11_000_000), "header has 11,000,000 bytes"),
    "layers.safetensors": (lambda path: safetensors(path, empty(
        "patch_embed.proj.weight", "pos_embed", *(f"blocks.{i}.norm1.weight" for i in range(20_000)))), "layout wants"),
    "number.safetensors": (lambda path: safetensors(path, empty(
        "patch_embed.proj.weight", f"blocks.{'9' * 5_000}.norm1.weight")), "layout wants"),
    # Tensors of other kinds.
    "sparse.pth": (lambda path: pth(path, **{"norm.weight": torch.ones(48).to_sparse()}), "_rebuild_sparse_tensor"),
    "meta.pth": (lambda path: pth(path, **{"norm.weight": torch.ones(1 << 40, device="meta")}), "_rebuild_meta_tensor"),
    "quantised.pth": (lambda path: pth(path, **{"norm.weight": torch.quantize_per_tensor(
        torch.ones(48), 0.1, 0, torch.qint8)}), "_rebuild_qtensor"),
    # No files of weights.
    "empty.pth": (lambda path: path.touch(), "is damaged"),
    "empty.npz": (lambda path: path.touch(), "is damaged"),
    "empty.safetensors": (lambda path: path.touch(), "is damaged"),
    "folder.pth": (lambda path: path.mkdir(), "is no regular file"),
    "pipe.pth": (os.mkfifo, "is no regular file"),
    "loop.pth": (lambda path: path.symlink_to(path), "cannot be read"),
}  # fmt: skip


@pytest.fixture(scope="module")
def read(tmp_path_factory):
    """What is said of each file, by one process that reads them all, and what that took."""
    folder = tmp_path_factory.mktemp("hostile")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch, on tensors that it does not want any more
        for name, (make, _) in ATTACKS.items():
            make(folder / name)
    names = sorted(ATTACKS, key=lambda name: name.endswith(".pth"))  # torch reads these, so they come last
    child = [sys.executable, "-c", CHILD, *(str(folder / name) for name in names)]
    done = subprocess.run(child, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", ATTACKS)
def test_is_refused_in_one_line(name, read):
    said = read["said"][name]
    assert said.isprintable()
    assert len(said) < 500
    assert re.search(ATTACKS[name][1], said), said


def test_takes_little_memory_and_no_torch(read):
    assert read["grown"] < MOST
    assert all(name.endswith(".pth") for name in read["torch"])


@pytest.mark.parametrize("suffix", [".safetensors", ".npz", ".pth", ".pt"])
def test_what_is_infinite_in_float32_is_refused(suffix, tmp_path):
    path = tmp_path / f"large{suffix}"
    large = torch.full((48,), 1e300, dtype=torch.float64)
    if suffix == ".npz":
        npz(path, **{"Transformer/encoder_norm/scale": large.numpy()})
    elif suffix == ".safetensors":
        save_file({**weights(), "norm.weight": large}, path)
    else:
        pth(path, old=suffix == ".pt", **{"norm.weight": large})
    with pytest.raises(
        ForeignError, match=r"(norm.weight|encoder_norm/scale) is not made of finite numbers in float32"
    ):
        loading.load_encoder(loading_options.LoadEncoder(path=path, **peers.TOLD))


@pytest.mark.parametrize("kind", [torch.complex64, torch.int32, torch.bool])
def test_what_is_no_real_number_is_refused(kind, tmp_path):
    pth(tmp_path / "kind.pth", **{"norm.weight": torch.ones(48, dtype=kind)})
    with pytest.raises(ForeignError, match="is not made of finite numbers"):
        loading.load_encoder(loading_options.LoadEncoder(path=tmp_path / "kind.pth", **peers.TOLD))


def test_nothing_larger_than_the_file_is_built(tmp_path):
    """The patches' width makes an encoder of 19 thousand million weights, of which the file has a hundred thousand."""
    width = 40_000
    wide = {name: torch.ones(1, 1) for name in weights() if not name.startswith("head")}
    wide |= {"patch_embed.proj.weight": torch.ones(width, 3, 1, 1), "pos_embed": torch.ones(1, 5, 1)}
    for name in ("norm.weight", "blocks.1.mlp.fc1.weight"):
        wide[name] = torch.ones(1, width)
    save_file(wide, tmp_path / "wide.safetensors")
    code = """import resource, sys
from pathlib import Path
from ssvit.loading import encoder as loading, encoder_options as loading_options
from ssvit.checkpoints import storage
from ssvit.options import UserError
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
try:
    loading.load_encoder(loading_options.LoadEncoder(path=sys.argv[1], heads=4))
except UserError as error:
    print(error)"""
    child = [sys.executable, "-c", code, str(tmp_path / "wide.safetensors")]
    done = subprocess.run(child, capture_output=True, text=True, check=True)
    assert re.search(r"makes \S+ of \S+, and the others need \S+$", done.stdout), done.stdout


def test_parts_that_do_not_fit_together_are_refused(tmp_path):
    name = "Transformer/encoderblock_0/MultiHeadDotProductAttention_1/key/kernel"
    npz(tmp_path / "parts.npz", **{name: numpy.ones((48, 4, 13), numpy.float32)})
    with pytest.raises(ForeignError, match="48, 4, 13"):
        loading.load_encoder(loading_options.LoadEncoder(path=tmp_path / "parts.npz", **peers.TOLD))


def test_a_dictionary_that_holds_itself_is_entered_once(tmp_path):
    state = weights()
    torch.save(state, tmp_path / "plain.pth")
    state["self"] = state
    torch.save(state, tmp_path / "itself.pth")
    found = reading.read(tmp_path / "itself.pth", peers.TOLD).weights()
    expected = reading.read(tmp_path / "plain.pth", peers.TOLD).weights()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


class Config:
    """What a training program of others stores beside its weights."""

    def __init__(self):
        self.rate = numpy.float64(0.1)


@pytest.mark.parametrize("old", [False, True])
def test_objects_of_other_classes_are_ignored(old, tmp_path, monkeypatch):
    """Also where their module is not installed."""
    other = types.ModuleType("other")
    other.Config = type("Config", (Config,), {"__module__": "other"})
    monkeypatch.setitem(sys.modules, "other", other)
    objects = {"args": argparse.Namespace(path=pathlib.Path("x")), "config": other.Config(), "best": numpy.float32(1)}
    torch.save({"model": weights(), **objects}, tmp_path / "x.pth", _use_new_zipfile_serialization=not old)
    monkeypatch.delitem(sys.modules, "other")
    expected = {f"model.{name}": tuple(value.shape) for name, value in weights().items()}
    assert files.shapes(tmp_path / "x.pth") == expected


@pytest.mark.parametrize("old", [False, True])
def test_torchs_files_hold_what_torch_reads(old, tmp_path):
    base = torch.arange(24.0).view(4, 6)
    state = {
        "plain": base.clone(), "turned": base.t(), "part": base[1:3, 2:5], "shared": base, "scalar": torch.tensor(3.0),
        "parameter": torch.nn.Parameter(base + 1), "half": base.half(), "brain": base.bfloat16(),
        "double": base.double(), "with.dots": {"inner": base - 1}, "none": None, "list": [base, 1, "x"], "epoch": 7,
    }  # fmt: skip
    module = torch.nn.Linear(3, 2)
    torch.save({**state, "module": module.state_dict()}, tmp_path / "x.pth", _use_new_zipfile_serialization=not old)
    whole = torch.load(tmp_path / "x.pth", weights_only=True)
    expected = {name: value for name, value in whole.items() if isinstance(value, torch.Tensor)}
    expected |= {f"module.{name}": value for name, value in whole["module"].items()}
    expected["with.dots.inner"] = whole["with.dots"]["inner"]
    assert files.shapes(tmp_path / "x.pth") == {name: tuple(value.shape) for name, value in expected.items()}
    found = files.tensors(tmp_path / "x.pth", list(expected))
    assert all(torch.equal(found[name], value.float()) for name, value in expected.items())


@pytest.mark.parametrize(
    "content",
    ['{"a":' * 100_000, "[]", "[" * 100_000, '{"layer_norm_eps": "small"}', '{"hidden_act": ["gelu"]}',
     '{"hidden_act": "quick_gelu"}', '{"image_size": {}}', '{"num_attention_heads": "four"}'],
)  # fmt: skip
def test_a_config_that_describes_nothing_is_refused(content, tmp_path):
    peer = peers.huggingface(tmp_path)
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError) as caught:
        reading.read(peer.path, {})
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 500


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_refused(tmp_path):
    pth(tmp_path / "closed.pth")
    (tmp_path / "closed.pth").chmod(0)
    with pytest.raises(ForeignError, match="Permission denied"):
        reading.read(tmp_path / "closed.pth", peers.TOLD)


def test_names_cannot_move_the_cursor(tmp_path):
    save_file({**weights(), "evil\n\x1b[31m" + "x" * 5_000: torch.ones(1)}, tmp_path / "names.safetensors")
    with pytest.raises(ForeignError, match="no place for") as caught:
        reading.read(tmp_path / "names.safetensors", peers.TOLD)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 500
