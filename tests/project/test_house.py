"""The structure of the package: imports run downward, and modules that must start fast do not import torch."""

import ast
import graphlib
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from command import LIMIT

from ssvit.__main__ import main
from ssvit.cli import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
LEVELS = (
    ("errors", "choices", "values", "variants"), ("engine",), ("config",), ("models",),
    ("kernels", "devices"), ("objectives", "data", "exchange", "checkpoints"), ("loading", "figures"),
    ("evaluation",), ("retrieval", "analysis", "training"), ("advice", "studies"), ("inference", "options"), ("cli",),
    ("api", "__main__"),
)  # fmt: skip
LEVEL = {package: level for level, packages in enumerate(LEVELS) for package in packages}
WITHOUT_TORCH = (
    "api", "choices", "errors", "values", "variants", "engine.atomic_io", "objectives.schedule", "training.recipe",
    "checkpoints.run_folder", "checkpoints.manifest", "loading.pretrained", "config.command", "config.help",
    "studies.comparison", "training.preset", "studies.sweep", "studies.trials", "retrieval.extraction",
    "evaluation.report.against", "evaluation.statistics", "data.sources.folder", "data.sources.shard_folder",
    "data.sources.vtab", "data.sources.splits", "data.sources.table", "studies.table", "exchange.reading",
    "checkpoints.checkpoint", "loading.finding", "exchange.graph",
)  # fmt: skip
MODULES = sorted((ROOT / "ssvit").rglob("*.py"))


def imports(source: str, known: frozenset[str] = frozenset()) -> set[str]:
    """Return the full names that a module imports, as modules if they are in `known`."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.add(full if full in known else node.module)
    return found


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


KNOWN = frozenset(name_of(path) for path in MODULES)
IMPORTS = {name_of(path): imports(path.read_text(), KNOWN) for path in MODULES}


def package_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def level_of(module: str) -> int:
    return LEVEL[package_of(module)] if "." in module else len(LEVELS)


def outside(module: str) -> set[str]:
    """Return the packages that a module imports, without ssvit and the standard library."""
    return {name.split(".")[0] for name in IMPORTS[module]} - {"ssvit"} - sys.stdlib_module_names


def test_imports_run_downward():
    for module, names in IMPORTS.items():
        upward = {name for name in names if name.startswith("ssvit") and level_of(name) > level_of(module)}
        assert not upward, f"{module} imports from a level above it"


def test_the_page_lists_packages_from_the_highest_to_the_lowest():
    rows = re.findall(r"^\| (`ssvit/.*?`) \|", (ROOT / "docs" / "architecture.md").read_text(), re.MULTILINE)
    names = [re.findall(r"`(\S+?)(?:\.py|/)?`", row) for row in rows]
    places = {name.replace("/", "."): place for place, row in enumerate(names) for name in row}

    def place(module: str) -> int | None:
        parents = (module.rsplit(".", drop)[0] for drop in range(module.count(".") + 1))
        return next((places[parent] for parent in parents if parent in places), None)

    assert len(places) > 20
    for module in KNOWN:
        if (above := place(module)) is not None:
            upward = {name for name in IMPORTS[module] & KNOWN if (at := place(name)) is not None and at < above}
            assert not upward, f"{module} imports from a row above it"


def test_no_two_modules_need_each_other():
    graph = {module: names & KNOWN for module, names in IMPORTS.items()}
    tuple(graphlib.TopologicalSorter(graph).static_order())


def test_no_two_packages_need_each_other():
    graph: dict[str, set[str]] = {}
    for module, names in IMPORTS.items():
        own = package_of(module)
        graph[own] = graph.get(own, set()) | {package_of(name) for name in names & KNOWN} - {own}
    tuple(graphlib.TopologicalSorter(graph).static_order())


@pytest.mark.parametrize(
    ("package", "order"),  # "": the modules of the package itself
    [("evaluation", ("", "probes", "evaluators", "report")), ("data", ("sources", "augment", ""))],
)
def test_subpackages_import_downward(package, order):
    def level(module: str) -> int:
        part = module.split(".")[2]
        return order.index(part if part in order else "")

    modules = {name for name in KNOWN if name.startswith(f"ssvit.{package}.")}
    assert {level(module) for module in modules} == set(range(len(order)))
    for module in sorted(modules):
        upward = {name for name in IMPORTS[module] & modules if level(name) > level(module)}
        assert not upward, f"{module} imports from above it"


def test_the_lowest_levels_know_torch_einops_and_pydantic_alone():
    for module in (module for module in KNOWN if level_of(module) <= LEVEL["devices"]):
        of_config = ("yaml", "hydra", "omegaconf") if package_of(module) in ("config", "values") else ()
        allowed = {"torch", "einops", "pydantic", "pydantic_core", "annotated_types", "tqdm", "faiss", "numpy"}
        astray = outside(module) - allowed - {*of_config, module.rpartition(".")[2]}  # models.timm uses timm
        assert not astray, module


def test_frameworks_stay_where_they_belong():
    homes = {
        "hydra": ("config",), "omegaconf": ("config",),
        "onnxruntime": ("exchange",), "timm": ("models",), "wandb": ("training",), "matplotlib": ("figures",),
        **dict.fromkeys(("lightning_fabric", "pytorch_lightning", "transformers", "vit_pytorch", "sklearn"), ()),
    }  # fmt: skip
    for module in KNOWN:
        astray = {one for one in outside(module) if one in homes and package_of(module) not in homes[one]}
        assert not astray, module


LOAD = """
import importlib, sys
for name in sys.argv[1].split():
    importlib.import_module(name)
    print(*(f"{name} loads {heavy}" for heavy in sys.argv[2].split() if heavy in sys.modules), end="")
"""


@pytest.mark.parametrize(
    ("modules", "heavy"),
    [
        ((f"ssvit.{module}" for module in WITHOUT_TORCH), "torch numpy PIL datasets pyarrow torchvision"),
        (
            (module for module in KNOWN if module.endswith("options")),
            "torch numpy hydra PIL datasets pyarrow torchvision",
        ),
    ],
    ids=["fast", "options"],
)
def test_modules_that_must_start_fast_load_no_torch(modules, heavy):
    command = [sys.executable, "-c", LOAD, " ".join(modules), heavy]
    done = subprocess.run(command, cwd=ROOT, timeout=LIMIT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_cli_holds_a_module_for_each_command_and_nothing_else():
    commands = {module.rpartition(".")[2] for module in KNOWN if package_of(module) == "cli" and module != "ssvit.cli"}
    assert commands == {name.replace("-", "_") for name in COMMANDS}


def test_the_list_of_commands_imports_no_command():
    check = (
        "import sys; from ssvit.__main__ import main; sys.argv[1:] = ['--help']; main(); "
        "sys.exit(any(name in sys.modules for name in ('hydra', 'pydantic', 'yaml', 'ssvit.cli.pretrain')))"
    )
    done = subprocess.run([sys.executable, "-c", check], cwd=ROOT, timeout=LIMIT, capture_output=True, text=True)
    assert done.returncode == 0
    assert all(f"  {name} " in done.stdout for name in COMMANDS)


SCRIPTS = ("evaluate", "few_shot", "finetune", "knn", "linear_probe", "pretrain", "retrieve")


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_in_tools_is_its_command(name, monkeypatch):
    started = []
    monkeypatch.setattr("ssvit.__main__._run", lambda *command: started.append(command))
    options = ["recipe.lr=1", "--help"]
    monkeypatch.setattr(sys, "argv", ["script", *options])
    runpy.run_path(str(ROOT / "tools" / f"{name}.py"), run_name="__main__")
    monkeypatch.setattr(sys, "argv", ["ssvit", name.replace("_", "-"), *options])
    main()
    assert started[0] == started[1] == (name.replace("_", "-"), options)


def test_tools_has_no_other_scripts():
    assert {path.stem for path in (ROOT / "tools").glob("*.py")} == set(SCRIPTS)


WAITING = ("communicate", "join", "run", "wait")


def test_each_wait_for_a_process_has_the_limit_of_all():
    """A fixed number of seconds fails on a slow machine, and no limit waits forever: `command.LIMIT` is that of all."""
    files = (ROOT / "tests").rglob("*.py")
    for path, node in ((file, node) for file in files for node in ast.walk(ast.parse(file.read_text()))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in WAITING:
            limits = [*node.args, *(keyword.value for keyword in node.keywords if keyword.arg == "timeout")]
            own = [one.value for one in limits if isinstance(one, ast.Constant) and isinstance(one.value, int | float)]
            assert not own, f"{path}, line {node.lineno}: {own}"
            has_limit = any(keyword.arg == "timeout" for keyword in node.keywords)
            assert has_limit or ast.unparse(node.func) != "subprocess.run", f"{path}, line {node.lineno}: no limit"


def test_no_two_files_of_tests_have_one_name():
    """pytest imports them by their names alone, and a second file of a name is not run."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert len(names) == len(set(names))
