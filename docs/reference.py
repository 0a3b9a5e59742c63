"""The tables of options on the page options.md, generated from the declarations when the site is built.

python docs/reference.py    # prints the page
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ssvit.choices import options_of
from ssvit.cli import COMMANDS, find_command
from ssvit.config.command_line import CommandLine
from ssvit.config.declaration import Options, expected, meanings, nested_options
from ssvit.errors import typed

PAGE = Path(__file__).with_name("options.md")
# The groups of choices, and what the names of their options begin with.
GROUPS = {
    "objective": "objective.", "target": "target.", "encoder": "encoder.", "data": "data.", "augment": "data.augment.",
    "probe": "", "evaluator": "", "logger": "", "index": "index.", "continuation": "continuation.",
}  # fmt: skip


def on_page_markdown(markdown: str, page: Any, **_: object) -> str:
    """Append the tables to the page of options, as a hook of MkDocs."""
    return f"{markdown}\n{tables()}" if page.file.src_uri == PAGE.name else markdown


def tables() -> str:
    """Return the options of all commands and of all choices as Markdown."""
    lines = ["## Commands"]
    commands = ((name, find_command(name).options) for name in COMMANDS)
    for name, options in commands:
        lines += section(f"ssvit {name}", options)
    line = CommandLine([])
    for group, prefix in GROUPS.items():
        lines += ["", f"## {group.capitalize()}"]
        choices: dict[type[Options], list[str]] = {}
        for name in line.names(group):
            if options := chosen(line, group, name):
                choices.setdefault(options, []).append(f"{group}={name}")
        for options, names in choices.items():
            lines += section(", ".join(names), options, prefix)
    return "\n".join(lines)


def chosen(line: CommandLine, group: str, name: str) -> type[Options] | None:
    """Return the class of options that a choice selects."""
    return options_of(line.part(group, name))


def section(title: str, options: type[Options], prefix: str = "") -> list[str]:
    """Return a heading, the description of a class of options, and a table of these."""
    table = list(rows(options, prefix))
    head = ["", f"### {title}", "", (options.__doc__ or "").strip()]
    return [*head, "", "| option | default | values | meaning |", "|---|---|---|---|", *table] if table else head


def rows(options: type[Options], prefix: str) -> Iterator[str]:
    """Yield a row of the table for each option, and for the options within it."""
    for name, field in options.model_fields.items():
        default = None if field.is_required() else field.get_default(call_default_factory=True, validated_data={})
        shown = "" if field.is_required() or isinstance(default, Options) else f"`{typed(default)}`"
        cells = f"`{prefix}{name}`", shown, expected(field.annotation, field.metadata), meanings(options).get(name, "")
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
        if nested := nested_options(field.annotation, field.metadata):
            yield from rows(nested, f"{prefix}{name}.")


if __name__ == "__main__":
    print(f"{PAGE.read_text()}\n{tables()}")
