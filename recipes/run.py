"""The command line: `draftsmith run RECIPE` and every stage alone.

Exit codes: 0 done; 1 an error, said in words; 2 wrong usage; 130 and 143 after Ctrl-C and SIGTERM, with all finished
work kept: the same command continues.
"""

import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from draftsmith.recipes.process import prepare_process

_CTRL_C = 130  # 128 + SIGINT
_SHOWN_N = 3  # the proposal length that figures of other projects are mostly given for

app = typer.Typer(
    name="draftsmith",
    help="Train the small draft heads that make large language models answer faster, and prove what they gain.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
states_app = typer.Typer(help="The cache of the target's hidden states.", no_args_is_help=True)
app.add_typer(states_app, name="hidden-states")


@app.callback()
def options(
    debug: Annotated[
        bool, typer.Option("--debug", help="show the traceback of an error; also after the command")
    ] = False,
) -> None:
    """Train the small draft heads that make large language models answer faster, and prove what they gain."""
    if debug:
        os.environ["DRAFTSMITH_DEBUG"] = "1"


RecipePath = Annotated[Path, typer.Argument(help="the recipe, a YAML file")]
Overrides = Annotated[list[str] | None, typer.Option("--set", metavar="A.B=C", help="override a setting; repeatable")]
Folder = Annotated[Path, typer.Argument(help="a cache folder, such as runs/NAME/hidden_states/train")]


@app.command()
def run(
    recipe: RecipePath,
    first: Annotated[str, typer.Option("--from", metavar="STAGE", help="first stage")] = "target",
    last: Annotated[str, typer.Option("--to", metavar="STAGE", help="last stage")] = "eval",
    overrides: Overrides = None,
) -> None:
    """Run a recipe: prompts, responses, rows, hidden states, training, export, evaluation, report.

    The stages are target, prompts, responses, rows, hidden_states, train, export and eval. What is finished is skipped,
    what was interrupted continues; settings that changed since are refused, naming them.
    """
    from draftsmith.recipes.schema import load_recipe
    from draftsmith.recipes.stages import read_report, run_stages

    loaded = load_recipe(recipe, overrides or [])
    run_stages(loaded, first, last)
    if last == "eval":
        typer.echo(summary(read_report(loaded.output_dir), loaded.output_dir / "eval" / "report.html"))


@app.command()
def check(recipe: RecipePath, overrides: Overrides = None) -> None:
    """Validate a recipe and estimate tokens, disk, memory and time; refuse what does not fit."""
    from draftsmith.recipes.estimate import estimate
    from draftsmith.recipes.schema import load_recipe
    from draftsmith.recipes.stages import Run, refuse_what_does_not_go_together

    loaded = load_recipe(recipe, overrides or [])
    found = estimate(loaded)
    with Run(loaded) as run:
        refuse_what_does_not_go_together(run)
    typer.echo(found.render())
    found.refuse_what_does_not_fit()


@app.command()
def doctor() -> None:
    """Look at this machine: torch, CUDA or ROCm, DeepSpeed, vLLM, disk, memory."""
    from draftsmith.recipes.doctor import Probe, diagnose, render

    findings = diagnose(Probe.real())
    typer.echo(render(findings))
    if any(finding.level == "fail" for finding in findings):
        raise typer.Exit(1)


def _stage(name: str, text: str) -> Callable[..., None]:
    def command(recipe: RecipePath, overrides: Overrides = None) -> None:
        from draftsmith.recipes.schema import load_recipe
        from draftsmith.recipes.stages import run_stages

        run_stages(load_recipe(recipe, overrides or []), name, name)

    command.__doc__ = text
    return command


for _name, _text in (
    ("prompts", "Read, clean and split the prompts."),
    ("responses", "Let the target answer the prompts."),
    ("rows", "Turn the answers into token rows with loss masks."),
    ("train", "Train the head."),
    ("eval", "Measure acceptance and speed, and write the report."),
):
    app.command(_name)(_stage(_name, _text))


@app.command()
def export(
    recipe: RecipePath,
    overrides: Overrides = None,
    push: Annotated[str | None, typer.Option(metavar="USER/REPO", help="upload to the Hugging Face Hub")] = None,
    is_public: Annotated[bool, typer.Option("--public", help="create the repository as a public one")] = False,
) -> None:
    """Write the trained head as a Hugging Face folder that vLLM loads."""
    from draftsmith.models.export import push_to_hub
    from draftsmith.recipes.schema import load_recipe
    from draftsmith.recipes.stages import run_stages

    loaded = load_recipe(recipe, overrides or [])
    run_stages(loaded, "export", "export")
    folder = loaded.output_dir / "export" / "model"
    typer.echo(f"exported to {folder}")
    if push:
        typer.echo(f"uploaded to {push_to_hub(folder, push, is_private=not is_public)}")


@app.command("import")
def import_(
    folder: Annotated[Path, typer.Argument(help="an exported folder: ours, or one that another trainer published")],
    into: Annotated[Path, typer.Option(metavar="HEAD_FOLDER", help="the new folder that the head is written to")],
    target: Annotated[str, typer.Option(metavar="ID_OR_FOLDER", help="the target of the head, as in target.model")],
    method: Annotated[str | None, typer.Option(metavar="NAME", help="default: found from its config.json")] = None,
) -> None:
    """Read an exported head back into one that can be trained further or measured (`train.start_from`)."""
    import yaml

    from draftsmith.recipes.imports import import_folder

    found = import_folder(folder, into, target, method)
    typer.echo(f"imported a {found.method} head of {found.num_parameters:,} parameters into {into}")
    if found.note:
        typer.echo(f"note: {found.note}")
    section = {"model": {"method": found.method, **found.settings}, "train": {"start_from": str(into)}}
    typer.echo(f"to use it in a recipe:\n\n{yaml.safe_dump(section, sort_keys=False)}")


@states_app.command("build")
def build(recipe: RecipePath, overrides: Overrides = None) -> None:
    """Check parity and build the cache of a recipe's rows."""
    from draftsmith.recipes.schema import load_recipe
    from draftsmith.recipes.stages import run_stages

    run_stages(load_recipe(recipe, overrides or []), "hidden_states", "hidden_states")


@states_app.command("verify")
def verify_cache(folder: Folder) -> None:
    """Compare every record with its checksum; name what is damaged or missing."""
    from draftsmith.hidden_states.cache import info, verify

    damages = verify(folder)
    for damage in damages:
        typer.echo(str(damage), err=True)
    if damages:
        typer.echo(f"{len(damages)} findings in {folder}", err=True)
        raise typer.Exit(1)
    typer.echo(f"{folder}: {info(folder)['num_records']} records, all as they were written")


@states_app.command("info")
def show_cache(folder: Folder) -> None:
    """Say what a cache holds."""
    from draftsmith.hidden_states.cache import info

    typer.echo(json.dumps(info(folder), indent=1, default=str))


def summary(report: dict[str, Any], path: Path) -> str:
    """What a run ends with: where the report is, held-out acceptance and speed-up at the recommended N."""
    from draftsmith.eval.summary import ALL

    recommended = report["recommended"]
    lines = [f"report: {path}"]
    workloads = report["workloads"]
    for name, cells in {ALL: workloads[ALL]}.items() if ALL in workloads else workloads.items():
        for cell in cells:
            length = cell["num_speculative_tokens"]
            if cell["mal"] is None or length not in {recommended["num_speculative_tokens"], _SHOWN_N}:
                continue
            text = f"{cell['engine']}, N={length}: mean acceptance length {cell['mal']:.2f}"
            if cell.get("mal_low") is not None:
                text += f" (95 % interval {cell['mal_low']:.2f} to {cell['mal_high']:.2f})"
            if cell.get("speedup") is not None:
                text += f", speed-up {cell['speedup']:.2f}x"
            lines.append(f"{text}, {name}")
    lines.append(recommended["verdict"])
    return "\n".join(lines)


def main() -> NoReturn:
    """Entry point. Errors that the user can mend are one message, without a traceback (`--debug` shows it)."""
    logging.captureWarnings(True)
    prepare_process()
    signal.signal(signal.SIGTERM, _terminate)
    # Wherever it stands: after a failure one appends it to the same command.
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    if len(arguments) < len(sys.argv) - 1:
        os.environ["DRAFTSMITH_DEBUG"] = "1"
    sys.exit(_exit_code(arguments))


def _exit_code(arguments: Sequence[str]) -> int:
    """Run a command; errors become a message and a code."""
    try:
        # Not `standalone`, so that errors come here; typer then returns the code of an Exit, and 130 after Ctrl-C.
        returned = app(list(arguments), standalone_mode=False)
        code = returned if isinstance(returned, int) else 0
        return _interrupted() if code == _CTRL_C else code
    except KeyboardInterrupt:
        return _interrupted()
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 1
    except Exception as error:
        usage = getattr(error, "format_message", None)  # of what is wrong with the command line
        if usage is not None:
            return _say(f"{usage()} (`draftsmith --help`)", 2) if usage() else 2
        if os.environ.get("DRAFTSMITH_DEBUG") or not isinstance(error, ValueError | RuntimeError | OSError):
            raise
        return _say(str(error), 1)


def _interrupted() -> int:
    return _say("interrupted; what is finished is kept, run the same command to continue", _CTRL_C)


def _terminate(*_: object) -> NoReturn:
    raise SystemExit(_say("terminated; what is finished is kept, run the same command to continue", 143))


def _say(text: str, code: int) -> int:
    print(f"draftsmith: {text}", file=sys.stderr, flush=True)
    return code
