"""How every command starts, from the command line or from Python: its options are composed, and failures are one line.

Status: 0 done, 1 failed, 2 the configuration is wrong, 130 and 143 stopped by Ctrl-C and SIGTERM.
"""

import io
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn, Protocol

from ssvit.config import composition
from ssvit.config.command_line import PYTHON, CommandLine
from ssvit.config.composed import Config
from ssvit.config.declaration import Options, locate
from ssvit.options import Failure, OptionError, UserError, print_lines, printable
from ssvit.processes import end_with_launcher, is_main_process, keep_memory

_NOT_IN_NAMES = re.compile(r"[^\w.=,+-]+")


class Results(Protocol):
    """The results of the jobs of a sweep (-m)."""

    def add(self, config: Config, folder: Path) -> float | None:
        """Add the job of a configuration by the folder that it left; return its value for a sweeper that searches."""

    def table(self) -> str:
        """Return the table of all jobs, "" if there are none."""


@dataclass(frozen=True)
class Command:
    """A command: it composes its options, with configs/<name>.yaml if there is one, and calls run(config).

    Attributes:
        name: The name of the command and of its file in configs/.
        run: The command itself.
        options: The class of its options. Those of the parts that it builds are declared by the parts.
        expansions: For options that stand for others, the dotted names of functions that change the command line. Each
            is imported and called, in this order, if its option is typed and is not null.
        before: Called with the command line before composition; it may add options and choices.
        stand_in: Called in place of a `before` that fails, such as one that finds no checkpoint, where the options are
            only described.
        positional: The option, a list, that takes the arguments which are not written as option=value.
        aliases: What beginnings of options stand for.
        common: Beginnings of the options that --help shows, all if empty.
        dry_run: What --dry-run calls in the place of `run`; it returns the completed configuration.
        results: The dotted name of the class that collects the results of a sweep, if `run` returns a run's folder.
        prefix: As of `CommandLine`.
    """

    name: str
    run: Callable[[Config], Any]
    options: type[Options]
    expansions: Mapping[str, str] = field(default_factory=dict)
    before: Callable[[CommandLine], None] | None = None
    stand_in: Callable[[CommandLine], None] | None = None
    positional: str | None = None
    aliases: Mapping[str, str] = field(default_factory=dict)
    common: Sequence[str] = ()
    dry_run: Callable[[Config], Config] | None = None
    results: str | None = None
    prefix: str = PYTHON

    def main(self, arguments: Sequence[str]) -> None:
        """Run with these arguments of the command line. A failure is one line, and ends the process."""
        # A waiting thread that spins takes the core from the one it waits for: up to 12 times slower on a busy machine.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        # One that sleeps at once is woken late; spinning for some 25 microseconds first costs the others little.
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
        keep_memory()
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")  # the terminal's encoding may lack a name's characters
        with in_one_line():
            with _configuration():
                line = self.line(arguments)
            if line.sweep:
                self._sweep(line)
            else:
                self._start(self.compose(line))

    def call(self, arguments: Sequence[str], *, config_dir: str | Path | None = None) -> Any:
        """Run with options as the command line takes them, and return what `run` does. Failure instead of an end.

        config_dir: a folder of configurations of the user's own. The process's environment stays as it is.
        """
        users = [] if config_dir is None else ["--config-dir", str(config_dir)]
        with _configuration():
            line = self.line([*users, *arguments])
        return self._start(self.compose(line))

    def line(self, arguments: Sequence[str], *, incomplete: bool = False) -> CommandLine:
        """The command line of these arguments, with what the command adds to it. UserError for a wrong one.

        incomplete: whether options that stand for others may be wrong.
        """
        line = CommandLine(arguments, aliases=self.aliases, positional=self.positional, prefix=self.prefix)
        for option, function in self.expansions.items():
            if line.typed.get(option, "null") not in ("null", ""):
                with suppress(UserError) if incomplete else nullcontext():
                    locate(function)(line)
        if self.before:
            self.before(line)
        return line

    def described(self, arguments: Sequence[str]) -> Config:
        """The configuration that these arguments make, for --help and completion, which need no checkpoint."""
        try:
            line = self.line(arguments)
        except UserError:
            line = replace(self, before=self.stand_in).line(arguments, incomplete=True)
        return self.compose(line, incomplete=True)

    def compose(self, line: CommandLine, *, incomplete: bool = False) -> Config:
        """The configuration that a command line makes. Failure for a wrong option.

        incomplete: whether options that have no default may be missing.
        """
        with _configuration():
            return composition.compose(self.name, line, self.options, incomplete=incomplete)

    def _sweep(self, line: CommandLine) -> None:
        results: Results | None = locate(self.results)() if self.results else None

        def job(config: Config) -> float | None:
            with in_one_line():  # Hydra would print a failure in its own way
                folder = self._start(config)
            return results.add(config, folder) if results else None

        composition.sweep(self.name, line, self.options, job)
        if results and is_main_process() and (table := results.table()):
            print_lines(*table.split("\n"))

    def _start(self, config: Config) -> Any:
        """Call `run` with a composed configuration; Failure for what a user can cause."""
        end_with_launcher()
        try:
            return self.run(config)
        except OptionError as error:
            raise Failure(str(OptionError(config.option(error.name), error.value, error.right)), 2) from None
        except UserError as error:
            raise Failure(str(error), getattr(error, "status", 1)) from None
        except OSError as error:
            raise Failure(f"{error.filename or 'system'}: {error.strerror or error}", 1) from None


def named(config: Config, name: str | None) -> Config:
    """Return a configuration with the name of its run, to which a job of a sweep (-m) adds the options of its own."""
    if name is not None and not any(option.startswith("name=") for option in config.own):
        name = "_".join([name, *(_NOT_IN_NAMES.sub("-", option) for option in config.own)])
    return config.changed({"name": name})


@contextmanager
def _configuration() -> Iterator[None]:
    """Make every error of a user that the block raises a Failure with the status of a wrong configuration."""
    try:
        yield
    except Failure:
        raise
    except UserError as error:
        raise Failure(str(error), 2) from None
    except OSError as error:
        raise Failure(f"{error.filename or 'system'}: {error.strerror or error}", 1) from None


@contextmanager
def in_one_line() -> Iterator[None]:
    """Failures and Ctrl-C in the block end the process with one line."""
    try:
        yield
    except Failure as failure:
        leave(str(failure), failure.status)
    except KeyboardInterrupt:
        leave("stopped by Ctrl-C", 130)


def leave(line: str, status: int) -> NoReturn:
    """Print one line and end the process."""
    sys.stdout.flush()
    print(f"{Path(sys.argv[0]).name}: {printable(line)}", file=sys.stderr)
    sys.exit(status)
