"""Train from a recipe: `accelerate launch -m draftsmith.train RECIPE`, or `… train RECIPE` in a checkout."""

import argparse
import os
import sys
from pathlib import Path

if not __package__:
    # Started as a folder: Python put it first on the path, where names like `config` would hide other modules.
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != Path(__file__).resolve().parent]

from draftsmith.recipes.process import prepare_process


def main() -> None:
    """Run the train stage of one recipe; its inputs must exist already."""
    prepare_process()
    import torch

    from draftsmith.recipes.schema import load_recipe
    from draftsmith.recipes.stages import train_stage

    parser = argparse.ArgumentParser(prog="draftsmith.train", description=__doc__)
    parser.add_argument("recipe", type=Path, help="the YAML file")
    parser.add_argument(
        "--set", action="append", default=[], metavar="A.B=C", help="override a setting; may be repeated"
    )
    arguments = parser.parse_args()
    try:
        train_stage(load_recipe(arguments.recipe, arguments.set))
    except (ValueError, RuntimeError, OSError) as error:  # as in recipes/run.py: the rest keeps its traceback
        if os.environ.get("DRAFTSMITH_DEBUG"):
            raise
        sys.exit(f"draftsmith.train: {error}")
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
