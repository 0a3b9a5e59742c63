"""The pages: each is part of the site, every link has a target, and the site builds without network access."""

import importlib
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from command import LIMIT

from ssvit.choices import choice_names, options_of
from ssvit.cli import COMMANDS, find_command
from ssvit.config.command_line import CommandLine

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])


def outside_code(text: str) -> str:
    """Markdown without its fenced and indented blocks."""
    return re.sub(r"^( {4}.*|```.*?^```)$", "", text, flags=re.MULTILINE | re.DOTALL)


def anchor(heading: str) -> str:
    return re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", outside_code(page.read_text())):
        if link.startswith(("https://", "http://")):
            continue
        file, _, heading = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), link
        if heading:
            headings = re.findall(r"^#+ (.+)$", target.read_text(), flags=re.MULTILINE)
            assert heading in map(anchor, headings), link


def test_every_page_stands_in_the_site():
    def files(entry):
        if isinstance(entry, str):
            return {entry}
        parts = entry.values() if isinstance(entry, dict) else entry
        return set().union(*map(files, parts))

    # Its other values name Python objects, which plain YAML does not support.
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    assert files(yaml.safe_load(nav)) == {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}


def test_the_reference_names_what_there_is():
    names = re.findall(r"^::: (\S+)$", (DOCS / "api.md").read_text(), flags=re.MULTILINE)
    assert names
    for name in names:
        module, _, attribute = name.rpartition(".")
        try:
            found = getattr(importlib.import_module(module), attribute)
        except AttributeError:
            found = importlib.import_module(name)
        assert found.__doc__, name


def test_the_page_of_options_has_every_option():
    """The reference lists every command, and every choice that is no file."""
    reference = runpy.run_path(str(DOCS / "reference.py"))
    tables = reference["tables"]()
    for name in COMMANDS:
        options = find_command(name).options
        part = re.search(rf"### ssvit {name}\n(.*?)(?=\n##|\Z)", tables, re.DOTALL)
        assert part, name
        assert {f"| `{option}` |" in part[1] for option in options.model_fields} <= {True}, name
    for group, prefix in reference["GROUPS"].items():
        for choice in choice_names(group):
            for option in options_of(CommandLine([]).part(group, choice)).model_fields:
                assert f"| `{prefix}{option}` |" in tables, (choice, option)


@pytest.mark.slow
def test_the_site_builds_without_network(tmp_path):
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    nowhere = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9", "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, **nowhere}, timeout=LIMIT
    )
    assert done.returncode == 0, done.stderr
    pages = {page.relative_to(tmp_path).with_suffix(".md") for page in tmp_path.rglob("*.html")}
    assert pages >= {page.relative_to(DOCS) for page in DOCS.rglob("*.md")}
    for page in tmp_path.rglob("*.html"):
        assert not re.search(r"(?:src|<link[^>]*href)=\"https?://", page.read_text()), page


def test_continuous_integration_calls_targets_of_the_makefile():
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert {"make test", "make test-oldest", "make lint", "make docs"} == set(commands)
    assert {command.partition(" ")[2] for command in commands} <= set(targets)


def test_the_citation_names_the_version_of_the_package():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = (ROOT / "pyproject.toml").read_text()
    assert f'version = "{citation["version"]}"' in project
    assert {"cff-version", "message", "title", "authors", "license"} <= citation.keys()
