"""The `quark` program: a typer app built from commands/; no logic."""

from __future__ import annotations

import atexit
import gc
import os
import sys

TYPE_CHECKING = False  # that of typing, which takes long to read: Ctrl-C is met from here on
if TYPE_CHECKING:
    import typer


HELP = "Quantize a model, and see what it cost.\n\nExample: quark quantize ./llama --for vllm -o ./llama-vllm"


def program() -> None:
    """Run the command line in a process of its own, which ends with it."""
    # oneDNN keeps code for each shape of a product, 1,024 of them: experts read another number of tokens each time.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
    main()


def main() -> None:
    """Run the command line; a QuarkError becomes one line on stderr and exit code 1, bad usage 2."""
    atexit.register(_leave_garbage)
    try:
        from quark.base.same_import_name import why_mixed

        if (why := why_mixed(sys.modules["quark"])) is not None:
            sys.stderr.write(f"quark: {why}\n")
            sys.exit(1)
        from quark.base.command_line import run

        run(app())
    except BaseException as error:
        from quark.errors import interrupt_code

        if (code := interrupt_code(error)) is None:
            raise
        sys.stderr.write("quark: Interrupted.\n")
        sys.exit(code)


def _leave_garbage() -> None:
    """Leave all objects to the end of the process: nothing is gained by looking through them for garbage once more.

    Except where triton 3.9 or newer is loaded, as torch for GPUs does: its module then prints thirty lines on "leaks".
    """
    if "triton._C.libtriton" not in sys.modules:
        gc.freeze()


def _version(asked: bool) -> None:
    if asked:
        from quark.__version__ import __version__

        sys.stdout.write(f"quark {__version__}\n")
        raise SystemExit


def app() -> typer.Typer:
    """The program."""
    import typer

    from quark.base.command_line import DEBUG_HELP
    from quark.commands import COMMANDS, SETTINGS

    def options(
        version: bool = typer.Option(False, "--version", is_eager=True, callback=_version, help="Print the version."),
    ) -> None:
        """The options of no command."""

    made = typer.Typer(
        name="quark",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
    )
    made.callback(help=HELP, epilog=DEBUG_HELP)(options)
    for name, command in COMMANDS.items():
        made.command(name, context_settings=SETTINGS.get(name))(command)
    return made
