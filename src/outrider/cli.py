"""The command line: its options before a command, how mistakes are shown, and the exit code."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from typing import Annotated, Any

import typer

from outrider import __version__, commands
from outrider.errors import Error, UserError

INTERRUPTED = 130

app = typer.Typer(
    name="outrider",
    help="Decode language models with speculative decoding, exactly as plain decoding would.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for command in (
    commands.models,
    commands.pull,
    commands.drafters,
    commands.generate,
    commands.bench,
    commands.profile,
):
    app.command()(command)

# Newer releases of typer carry a click of their own: take the base of its errors from there.
ClickException: type[Any] = next(
    base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException"
)


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        typer.echo(f"outrider {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(2)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and exit: 0 done, 1 failed, 2 a mistake of the user, 130 interrupted."""
    # What transformers has to say about a configuration is either said by us or not an error.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    shown: set[str] = set()

    def show_once(message: Warning | str, *_: object, **__: object) -> None:
        """A warning as one line, without the place in our code that it came from."""
        if str(message) not in shown:
            shown.add(str(message))
            _complain(f"warning: {message}", 0)

    warnings.showwarning = show_once
    try:
        code = app(args=arguments, standalone_mode=False)
        sys.stdout.flush()
    except ClickException as error:
        sys.exit(_complain(error.format_message(), 2))
    except UserError as error:
        sys.exit(_complain(str(error), 2))
    except Error as error:
        sys.exit(_complain(str(error), 1))
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(_complain("interrupted", INTERRUPTED))
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(1)
    except UnicodeError as error:
        sys.exit(_complain(f"this terminal's encoding cannot show or read the text: {error}", 1))
    except OSError as error:
        _give_up_stdout()
        sys.exit(_complain(f"the system refused: {error}", 1))
    if code == INTERRUPTED:  # typer has answered the interrupt itself
        _complain("interrupted", INTERRUPTED)
    sys.exit(code or 0)  # typer.Exit comes back as its code


def _give_up_stdout() -> None:
    """What could not be written would be tried again, and fail again, when Python exits."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _complain(message: str, code: int) -> int:
    print(f"outrider: {' '.join(message.split())}", file=sys.stderr)
    return code
