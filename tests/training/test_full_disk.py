"""A full disk, represented by the limit of the system for the size of a file: one line names the file, and all other
files are unchanged.
"""

import resource
from contextlib import contextmanager
from pathlib import Path

import pytest

from ssvit.analysis.inside import Report
from ssvit.engine import atomic_io
from ssvit.errors import UserError
from ssvit.figures.plot import Line, Panel, Plot

STORED = Path(__file__).parents[1] / "fixtures"


@contextmanager
def limited(size: int):
    """Limit the size of every file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_file_is_replaced_whole_or_not_at_all_and_the_error_has_its_name(tmp_path):
    (tmp_path / "kept.json").write_text("old")
    with limited(4096), pytest.raises(OSError, match="too large") as error:
        atomic_io.replace(tmp_path / "kept.json", bytes(100_000))
    assert error.value.filename == str(tmp_path / "kept.json")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"kept.json": "old"}


def test_a_figure_that_cannot_be_written_is_named(tmp_path):
    figures = {"attention": Plot([Panel("", [Line([0, 1, 2], [1, 2, 0])])], (6.4, 4.8))}
    with limited(512), pytest.raises(UserError, match=f"{tmp_path}/seen/attention.png"):
        Report(figures, {"a": 1}, []).save(tmp_path / "seen")
    assert not list((tmp_path / "seen").glob("*.png"))


def test_the_answers_of_predict_are_there_whole_or_not_at_all(tmp_path, call, capsys):
    """What the command prints is captured in memory, since the limit also holds for files that capture output."""
    (tmp_path / "answers.json").write_text("[]\n")
    run = STORED / "outputs" / "finetune_masked_patch_shapes"
    options = (f"checkpoint={run}", f"output={tmp_path}/answers.json", str(STORED / "pictures"))
    with limited(512), pytest.raises(UserError, match=f"^{tmp_path}/answers.json: File too large$"):
        call("predict", *options)
    assert [path.name for path in tmp_path.iterdir()] == ["answers.json"]
    assert (tmp_path / "answers.json").read_text() == "[]\n"
