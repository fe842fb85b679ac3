"""The command line `rapidkda`, one file a command.

Exit codes: 0 it holds, 1 a check or a command failed, 2 the user must change something (one line says what).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, NoReturn

import typer

from .. import __version__
from ..errors import BackendUnavailable, ConfigConflict
from . import bench, capture, compile, demo, doctor, eval, generate, plan, verify
from .console import VARIABLES, UserError, complaint

USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[2]  # the base of every complaint about arguments

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")
app.command("doctor")(doctor.doctor)
app.command("demo")(demo.demo)
app.command("generate")(generate.generate)
app.command("verify")(verify.verify)
app.command("eval")(eval.evaluate)
app.command("capture")(capture.capture_operands)
app.command("compile")(compile.compile_kernels)
app.command("plan")(plan.plan)
app.add_typer(bench.app, name="bench")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"rapidkda {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Kimi Delta Attention for serving. Start with `rapidkda doctor`, then `rapidkda demo`."""
    if context.invoked_subcommand != "doctor":  # which shows what is wrong beside everything else
        for variable in VARIABLES:
            if problem := complaint(variable):
                raise UserError(problem)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = app(given or ["--help"], prog_name="rapidkda", standalone_mode=False)
    except USAGE_ERROR as error:
        sys.exit(_refuse(error.format_message() if hasattr(error, "format_message") else str(error)))
    except (UserError, BackendUnavailable, ConfigConflict) as error:
        first, *reasons = str(error).splitlines()
        sys.exit(_refuse(" ".join([first, "; ".join(reason.strip() for reason in reasons)]).strip()))
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    sys.exit(code if isinstance(code, int) else 0)


def _refuse(message: str) -> int:
    typer.echo(f"rapidkda: error: {message}", err=True)
    return 2
