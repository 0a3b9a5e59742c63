"""A disk that takes no more, stood in for by the system's limit on a file's size: one line names the file, the rest
stays as it was.
"""

import subprocess
import sys
from pathlib import Path

import pytest
from command import one_line
from PIL import Image

from ssvit.figures.plot import Line, Panel, Plot

STORED = Path(__file__).parents[1] / "fixtures"
# In blocks of 512 bytes; an import may want to write a few bytes.
LIMITED = ("sh", "-c", 'ulimit -f "$0" && exec "$@"')


def figures():
    """Five that are unlike each other, of some 20 kB."""
    lines = {f"figure{number}": Line([0, 1, 2], [1, 2, number]) for number in range(5)}
    return {name: Plot([Panel("", [line])], (6.4, 4.8)) for name, line in lines.items()}


def refused(code: str, *arguments: object, blocks: int) -> str:
    """What a child says on the console that runs this code and can write so many blocks into a file."""
    path = [*LIMITED, str(blocks), sys.executable, "-B", "-c", f"import sys\n{code}", *map(str, arguments)]
    done = subprocess.run(path, capture_output=True, text=True, cwd=Path(__file__).parent)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_a_file_is_replaced_whole_or_not_at_all_and_the_error_has_its_name(tmp_path):
    (tmp_path / "kept.json").write_text("old")
    code = """
from pathlib import Path
from ssvit import atomic_io
try:
    atomic_io.replace(Path(sys.argv[1]), bytes(100_000))
except OSError as error:
    print(error.filename)
"""
    assert refused(code, tmp_path / "kept.json", blocks=8) == f"{tmp_path}/kept.json\n"
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"kept.json": "old"}


# No figure fits; all figures do, and numbers.json does not.
@pytest.mark.parametrize(("blocks", "named"), [(1, "figure0.png"), (120, "numbers.json")])
def test_figures_that_a_disk_refuses_are_named_without_a_thread_that_dies(blocks, named, tmp_path):
    code = """
from pathlib import Path
from test_full_disk import figures
from ssvit.analysis.inside import Report
from ssvit.options import UserError
try:
    Report(figures(), {"a": "1" * 100_000}, []).save(Path(sys.argv[1]))
except UserError as error:
    print(error)
"""
    (line,) = refused(code, tmp_path / "seen", blocks=blocks).splitlines()
    assert line.startswith(f"{tmp_path}/seen/{named}")
    assert "cannot be written (File too large)" in line
    for path in (tmp_path / "seen").glob("*.png"):
        with Image.open(path) as picture:
            picture.load()


def test_the_answers_of_predict_are_there_whole_or_not_at_all(tmp_path, tool):
    (tmp_path / "answers.json").write_text("[]\n")
    run = STORED / "outputs" / "finetune_masked_patch_synthetic"
    options = (f"checkpoint={run}", f"output={tmp_path}/answers.json", str(STORED / "pictures"))
    done = tool("predict", *options, status=1, prefix=(*LIMITED, "1"), PYTHONDONTWRITEBYTECODE="1")
    done.stdout = ""
    assert one_line(done) == f"ssvit: {tmp_path}/answers.json: File too large"
    assert [path.name for path in tmp_path.iterdir()] == ["answers.json"]
    assert (tmp_path / "answers.json").read_text() == "[]\n"
