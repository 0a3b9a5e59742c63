"""How every tool starts, from the command line or from Python: its options are composed, and failures are one line.

Status: 0 done, 1 failed, 2 the configuration is wrong, 130 and 143 stopped by Ctrl-C and SIGTERM.
"""

import io
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from tqdm import tqdm

from ssvit.config import composition
from ssvit.config.command_line import PYTHON, CommandLine
from ssvit.config.composed import Config
from ssvit.config.declaration import Options
from ssvit.data import arguments as images
from ssvit.options import Failure, OptionError, UserError, print_lines, printable, typed
from ssvit.processes import end_with_launcher, is_main_process

# Whatever names timm's model has for them.
TIMM_ARGUMENTS = {f"encoder.arguments{mark}": f"++encoder.arguments{mark}" for mark in ".="}
ALIASES = {"evaluator=": "evaluator@evaluators=", **TIMM_ARGUMENTS}  # of the tools that train, see `Tool`


@dataclass(frozen=True)
class Tool:
    """A command: it composes its options, with configs/<name>.yaml if there is one, and calls run(config).

    Attributes:
        name: The name of the command and of its file in configs/.
        purpose: What it is for, in a few words.
        run: The command itself.
        before: Called with the command line before composition; it may add options and choices.
        positional: The option, a list, that takes the arguments which are not written as option=value.
        aliases: What beginnings of options stand for.
        options: The class of its options. Those of the parts that it builds are declared by the parts.
        common: Beginnings of the options that --help shows, all if empty.
        dry_run: What --dry-run calls in the place of `run`; it returns the completed configuration.
        own_images: Options that data=PATH adds, unless they are typed.
        spelling: As of `CommandLine`.
    """

    name: str
    purpose: str
    run: Callable[[Config], Any]
    before: Callable[[CommandLine], None] | None = None
    positional: str | None = None
    aliases: Mapping[str, str] = field(default_factory=dict)
    options: type[Options] = Options
    common: Sequence[str] = ()
    dry_run: Callable[[Config], Config] | None = None
    own_images: Sequence[str] = ()
    spelling: tuple[str, str] = PYTHON

    def main(self, arguments: Sequence[str]) -> None:
        """Run with these arguments of the command line. A failure is one line, and ends the process."""
        # A waiting thread that spins takes the core from the one it waits for: up to 12 times slower on a busy machine.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        # One that sleeps at once is woken late; spinning for some 25 microseconds first costs the others little.
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
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

    def line(self, arguments: Sequence[str]) -> CommandLine:
        """The command line of these arguments, with what the tool adds to it. UserError for a wrong one."""
        line = CommandLine(arguments, aliases=self.aliases, positional=self.positional, spelling=self.spelling)
        images.expand(line, self.own_images)
        if self.before:
            self.before(line)
        return line

    def compose(self, line: CommandLine, *, incomplete: bool = False) -> Config:
        """The configuration that a command line makes. Failure for a wrong option.

        incomplete: whether options that have no default may be missing.
        """
        with _configuration():
            return composition.compose(self.name, line, self.options, incomplete=incomplete)

    def _sweep(self, line: CommandLine) -> None:
        jobs = []

        def job(config: Config) -> float | None:
            with in_one_line():  # Hydra would print a failure in its own way
                left = self._start(config)
            if not isinstance(left, Path):
                return None
            from ssvit.cli import sweep

            parts = (option.lstrip("+").partition("=") for option in config.own)
            jobs.append(sweep.Job({name: value for name, _, value in parts}, left))
            return sweep.value(left, config)  # what a sweeper that searches goes by

        composition.sweep(self.name, line, self.options, job)
        if jobs and is_main_process():
            from ssvit.cli import sweep

            print_lines(*sweep.table(jobs).split("\n"))

    def _start(self, config: Config) -> Any:
        """Call `run` with a composed configuration; Failure for what a user can cause."""
        end_with_launcher()
        try:
            return self.run(config)
        except OptionError as error:
            raise Failure(f"{config.option(error.name)}={typed(error.value)}: {error.right}", 2) from None
        except UserError as error:
            raise Failure(str(error), getattr(error, "status", 1)) from None
        except OSError as error:
            raise Failure(f"{error.filename or 'system'}: {error.strerror or error}", 1) from None


def job_name(config: Config, name: str) -> str:
    """The name of a run; a job of a sweep (-m) has its own values in it."""
    if not config.own or any(option.startswith("name=") for option in config.own):
        return name
    return "_".join([name, *(_NOT_IN_NAMES.sub("-", option) for option in config.own)])


_NOT_IN_NAMES = re.compile(r"[^\w.=,+-]+")


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


def progress(what: str, unit: str) -> Callable[[int, int], None]:
    """A function of (done, all) that shows the progress, its rate and the time left, unless it is soon done."""
    rarely = 0.5 if sys.stdout.isatty() else 10
    bar = tqdm(desc=what, unit=unit, mininterval=rarely, delay=rarely, dynamic_ncols=True, file=sys.stdout)

    def show(done: int, total: int) -> None:
        bar.total = total
        bar.update(done - bar.n)
        if done == total:
            bar.close()

    return show


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
