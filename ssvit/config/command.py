"""Run commands from the command line or from Python: compose the options and report failures in one line.

Exit status: 0 success, 1 failure, 2 invalid configuration, 130 and 143 stopped by Ctrl-C and SIGTERM.
"""

import hashlib
import io
import os
import pkgutil
import re
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from ssvit.config import composition
from ssvit.config.command_line import PYTHON, CommandLine
from ssvit.config.composed import Config
from ssvit.config.declaration import Options
from ssvit.engine.processes import end_with_launcher, is_main_process, keep_memory, launched
from ssvit.errors import Failure, OptionError, UserError, print_lines, printable

_CHECKPOINT = "checkpoint"  # the option that `Command.before` reads
_NOT_IN_NAMES = re.compile(r"[^\w.=,+-]+")


@dataclass(frozen=True)
class Command:
    """A command with its options, which are composed with configs/<name>.yaml if this file exists.

    Attributes:
        name: Name of the command and of its file in configs/.
        run: Function that executes the command.
        options: Class of its options. The options of its parts are declared by the parts.
        expansions: For options that are replaced by other options, the dotted names of functions that change the
            command line. Each is imported and called, in this order, if its option is typed and is not null.
        before: Called with the command line before composition; may add options and choices.
        stand_in: Called instead of a failing `before` (for example, without a checkpoint) if the options are only
            described.
        positional: Name of the option, a list, that receives arguments not written as option=value.
        aliases: Other names of options, such as {"probes": "probe@probes"}.
        common: Prefixes of the options that --help shows; all options if empty.
        dry_run: Called by --dry-run instead of `run`; returns the completed configuration.
        results: Dotted name of the class that collects the results of a sweep (-m), if `run` returns the folder of a
            run, such as `ssvit.studies.sweep.Sweep`.
        prefix: As in `CommandLine`.
        study: Whether `run` only executes other commands, each in its own processes, which `launch` describes.
    """

    name: str
    run: Callable[[Config], Any]
    options: type[Options]
    expansions: Mapping[str, str] = field(default_factory=dict)
    before: Callable[[CommandLine], object] | None = None
    stand_in: Callable[[CommandLine], None] | None = None
    positional: str | None = None
    aliases: Mapping[str, str] = field(default_factory=dict)
    common: Sequence[str] = ()
    dry_run: Callable[[Config], Config] | None = None
    results: str | None = None
    prefix: str = PYTHON
    study: bool = False

    def main(self, arguments: Sequence[str]) -> None:
        """Run the command from the command line; a failure is printed as one line and ends the process."""
        # Spinning threads occupy cores that working threads need: up to 12 times slower on a busy machine.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        # Threads that sleep immediately are woken late; spinning for about 25 microseconds first costs little.
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
        keep_memory()
        sys.unraisablehook = _repeat_interrupt
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")  # for characters outside the terminal's encoding
        with exit_on_failure():
            with _failures(2):
                line = self.line(arguments)
            if line.sweep:
                self._sweep(line)
            else:
                self._start(self.compose(line))

    def call(
        self,
        arguments: Sequence[str] = (),
        options: Mapping[str, object] | None = None,
        tree: Options | None = None,
    ) -> Any:
        """Run the command from Python; errors are raised as Failure and do not end the process.

        Args:
            arguments: Arguments as in a shell.
            options: Options by name, with their values.
            tree: Options as one object; `options` take precedence.

        Returns:
            The result of `run`.
        """
        with _failures(2):
            line = self.line(arguments, options, tree)
        config = self.compose(line)
        launch = None if self.study else getattr(config.options, "launch", None)
        if launch is not None and launched() is None:  # further processes would repeat the calling program
            with _failures(2):
                config = config.changed({"launch.devices": launch.single()})
        return self._start(config)

    def line(
        self,
        arguments: Sequence[str] = (),
        options: Mapping[str, object] | None = None,
        tree: Options | None = None,
        *,
        incomplete: bool = False,
    ) -> CommandLine:
        """Return the command line of arguments, including the options that the command adds.

        Args:
            arguments: Arguments as in a shell.
            options: Options by name, with their values.
            tree: Options as one object; `options` take precedence.
            incomplete: Whether to ignore errors in options that are replaced by other options.

        Raises:
            UserError: An argument is invalid.
        """
        line = CommandLine(
            arguments, options, tree, aliases=self.aliases, positional=self.positional, prefix=self.prefix
        )
        swept = composition.swept(line) if line.sweep else set()
        self._expand(line, swept, incomplete)
        return line

    def _expand(self, line: CommandLine, swept: Collection[str] = (), incomplete: bool = False) -> None:
        """Apply the expansions, and then `before`, except those of options that are swept or that depend on them."""
        for option, function in self.expansions.items():
            if option not in swept and line.typed.get(option) is not None:
                with suppress(UserError) if incomplete else _without(swept):
                    pkgutil.resolve_name(function)(line)
        if self.before and _CHECKPOINT not in swept:
            with _without(swept):
                self.before(line)

    def described(self, arguments: Sequence[str]) -> Config:
        """Return the configuration for --help, which does not require a checkpoint."""
        try:
            line = self.line(arguments)
        except UserError:
            line = replace(self, before=self.stand_in).line(arguments, incomplete=True)
        return self.compose(line, incomplete=True)

    def compose(self, line: CommandLine, *, incomplete: bool = False) -> Config:
        """Return the configuration of a command line; raise Failure if an option is invalid.

        Args:
            line: The command line.
            incomplete: Whether required options may be missing.
        """
        with _failures(2):
            return composition.compose(self.name, line, self.options, incomplete=incomplete)

    def _sweep(self, line: CommandLine) -> None:
        results = pkgutil.resolve_name(self.results)() if self.results else None

        def job(job_line: CommandLine, swept: Sequence[str]) -> float | None:
            with exit_on_failure():  # otherwise, Hydra would report the failure in its format
                with _failures(2):
                    self._expand(job_line)
                config = replace(self.compose(job_line), swept=swept)
                folder = self._start(config)
            return results.add(config, folder) if results else None

        with _failures(1):
            composition.sweep(self.name, line, self.options, job)
        if results and is_main_process() and (table := results.table()):
            print_lines(*table.split("\n"))

    def _start(self, config: Config) -> Any:
        """Call `run` with a composed configuration, and convert errors that a user can correct to Failure."""
        end_with_launcher()
        with _failures(1), config.names_as_typed():
            return self.run(config)


def named(config: Config, name: str | None) -> Config:
    """Return a configuration with the name of its run; a job of a sweep (-m) appends its differing options."""
    if name is not None and not any(option.startswith("name=") for option in config.swept):
        name = "_".join([name, *map(_in_name, config.swept)])
    return config.changed({"name": name})


def _in_name(option: str) -> str:
    """Return an option as a part of a folder's name; a checksum distinguishes options with replaced characters."""
    written = _NOT_IN_NAMES.sub("-", option)
    return written if written == option else f"{written}-{hashlib.sha256(os.fsencode(option)).hexdigest()[:4]}"


@contextmanager
def _without(swept: Collection[str]) -> Iterator[None]:
    """Ignore an invalid option that has several values in a sweep, which each job checks."""
    try:
        yield
    except OptionError as error:
        if error.name not in swept:
            raise


@contextmanager
def _failures(status: int) -> Iterator[None]:
    """Convert errors that a user can correct to Failure with an exit status; that of an invalid option is 2."""
    try:
        yield
    except Failure:
        raise
    except UserError as error:
        usual = 2 if isinstance(error, OptionError) else status
        raise Failure(str(error), getattr(error, "status", usual)) from None
    except OSError as error:
        raise Failure(f"{error.filename or 'system'}: {error.strerror or error}", 1) from None


@contextmanager
def exit_on_failure() -> Iterator[None]:
    """End the process with one line of text if the block raises Failure or KeyboardInterrupt."""
    try:
        yield
    except Failure as failure:
        exit_with(str(failure), failure.status)
    except KeyboardInterrupt:
        if sys.stdout.isatty():
            print()  # after a progress bar
        exit_with("stopped by Ctrl-C", 130)


def _repeat_interrupt(ignored: "sys.UnraisableHookArgs") -> None:
    """Repeat a Ctrl-C that arrived in a callback, for instance of a weak reference, where Python ignores exceptions."""
    if issubclass(ignored.exc_type, KeyboardInterrupt):
        main = threading.main_thread().ident
        threading.Timer(0.1, signal.pthread_kill, (main, signal.SIGINT)).start()  # after the callback
    else:
        sys.__unraisablehook__(ignored)


def exit_with(line: str, status: int) -> NoReturn:
    """Print one line to stderr and end the process."""
    sys.stdout.flush()
    print(f"{Path(sys.argv[0]).name}: {printable(line)}", file=sys.stderr)
    sys.exit(status)
