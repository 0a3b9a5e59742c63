"""Values are read from texts with the rules of YAML, any other text is used as typed, and texts are read back."""

import math
import random
import sys

import pytest
import yaml
from hydra.core.global_hydra import GlobalHydra

from ssvit.cli import find_command
from ssvit.config import composition
from ssvit.config.command_line import CommandLine
from ssvit.values import text_of, value_of

PIECES = (
    *"[]{},:'\"\\ \t\n\r\0\x1b\x7f\x85\xa0\u2028\ufeff\ud83d\udcff😀üa1-?#&*!|>%@`~=./_+e.$", "null", "true", "1e-3",
    "1_000", "\\'", "''", "---", "...", ": ", " #", "inf", "[a", "a]", "_target_",
)  # fmt: skip
PATHS = (
    "photos (1)", "it's", "a, b", "Fotos [2024]", "ünï", "a: b", "x #y", "C:\\pics", "=", " leading", "trailing ",
    "[2024", "[a]b]", "{a}", "'q'x'", '"', "a\nb", "choice(a,b)", "range(1,3)", "2024_01", "007", "12:30", "yes", "off",
    "2024-01-01", "0x10", "~", "-", "a\\", "&a", "*a", "!a", "[*a]", "[&a b]", "[!!str 3]", "[a,,b]", "${", "",
)  # fmt: skip


def sample(random_numbers: random.Random, depth: int = 0) -> object:
    """A value of an option, with strings of characters that have a meaning in YAML."""

    def text() -> str:
        return "".join(random_numbers.choices(PIECES, k=random_numbers.randrange(8)))

    kind = random_numbers.randrange(8 if depth < 3 else 6)
    if kind == 7:
        return {text(): sample(random_numbers, depth + 1) for _ in range(random_numbers.randrange(4))}
    if kind == 6:
        return [sample(random_numbers, depth + 1) for _ in range(random_numbers.randrange(4))]
    number = random_numbers.uniform(-1, 1) * 10.0 ** random_numbers.randrange(-20, 20)
    return [text(), text(), text(), number, int(number), random_numbers.choice([None, True, False, math.inf])][kind]


def typed_equal(one: object, other: object) -> bool:
    return repr(one) == repr(other)  # True and 1 are equal but differ in their type


@pytest.mark.parametrize("seed", range(4))
def test_every_value_is_read_from_its_text(seed):
    random_numbers = random.Random(seed)
    for _ in range(300):
        value = sample(random_numbers)
        assert typed_equal(value_of(text_of(value)), value)


@pytest.mark.parametrize("seed", range(4))
def test_every_text_has_a_value_and_its_text_is_typed_alike(seed):
    random_numbers = random.Random(seed)
    for _ in range(300):
        text = "".join(random_numbers.choices(PIECES, k=random_numbers.randrange(12)))
        for typed in (text, f"[{text}]", f"{{{text}}}", f'"{text}"'):
            value = value_of(typed)
            assert typed_equal(value_of(text_of(value)), value)


@pytest.mark.parametrize("text", ["1" * 5000, "[" * 900 + "]" * 900, '"\\UFFFFFFFF"', '"\\U00110000"'])
def test_a_text_that_no_parser_reads_is_a_text(text):
    assert value_of(text) == text


@pytest.mark.parametrize("text", PATHS)
def test_any_other_text_is_a_text(text):
    assert value_of(text) == text


@pytest.mark.parametrize(("text", "value"), [
    ("null", None), ("true", True), ("False", False), ("3", 3), ("-3", -3), ("1_000", 1000), ("103_983", 103983),
    ("1e-3", 1e-3), (".5", 0.5), ("2.", 2.0), ("-inf", -math.inf), ("'3'", "3"), ('"a\\tb"', "a\tb"),
    ("'it''s'", "it's"), ("[]", []), ("[1e-3,a b,'null',null,12:30,yes,2024-01-01,http://x/y]",
    [1e-3, "a b", "null", None, "12:30", "yes", "2024-01-01", "http://x/y"]), ("{lr:1e-3}", {"lr": 1e-3}),
    ("{lr: 1e-3, of: [{a:'b c'}]}", {"lr": 1e-3, "of": [{"a": "b c"}]}), ("{}", {}),
])  # fmt: skip
def test_a_value_is_what_it_looks_like(text, value):
    assert typed_equal(value_of(text), value)


@pytest.mark.parametrize("text", ["[1, [2, {a: b}]]", "{a: 'b: c', \"d\": [true, null]}", "['it''s', \"\\u00fc\"]"])
def test_lists_and_dictionaries_are_those_of_yaml(text):
    assert value_of(text) == yaml.safe_load(text)


@pytest.mark.parametrize("value", [object(), [object()], {"a": {1, 2}}, b"bytes"])
def test_a_value_that_no_option_has_is_refused(value):
    with pytest.raises(TypeError):
        text_of(value)


def test_any_text_is_an_option_as_typed():
    names = [name for name in PATHS if name and "$" not in name]
    line = find_command("embed").line(["data=null"])  # a command that composes quickly
    command = find_command("embed")
    for name in names:
        assert command.compose(line.changed({"outputs": name}), incomplete=True).values["outputs"] == name


def swept(folder, *options: str) -> list[tuple[dict, list[str]]]:
    """The options of each job of a sweep, and those in which it differs."""
    command, jobs = find_command("pretrain"), []

    def job(line: CommandLine, differing: list[str]) -> None:
        jobs.append((command.compose(line).values, list(differing)))

    line = command.line(["-m", "preset=null", *options])
    try:
        composition.sweep(command.name, line, command.options, job)
    finally:
        GlobalHydra.instance().clear()
    return jobs


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["ssvit"])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    return tmp_path


def test_values_that_are_not_swept_do_not_reach_hydra(place):
    outputs = "it's [2024]: photos (1)"
    jobs = swept(place, f"outputs={outputs}", "name={a}", "objective=mae,simmim", "recipe.betas=[0.8,0.9]")
    assert [differing for _, differing in jobs] == [["objective=mae"], ["objective=simmim"]]
    for values, _ in jobs:
        assert (values["outputs"], values["name"], values["recipe"]["betas"]) == (outputs, "{a}", [0.8, 0.9])
    assert [path.name for path in place.iterdir()] == [outputs]


def test_swept_values_have_hydras_syntax_and_are_read_as_those_of_one_job(place):
    jobs = swept(place, "recipe.lr=1e-3,2e-3", r"name='it\'s, (1)','3'")
    read = {(values["recipe"]["lr"], values["name"]) for values, _ in jobs}
    assert read == {(lr, name) for lr in (1e-3, 2e-3) for name in ("it's, (1)", "3")}
    assert len(jobs) == 4
