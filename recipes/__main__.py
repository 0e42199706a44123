"""`python -m draftsmith.recipes`: the command line where the `draftsmith` script is not on the path."""

from draftsmith.recipes.run import main

if __name__ == "__main__":
    main()
