"""`python -m fisher_lit` is the console script."""

from fisher_lit.cli import main

if __name__ == "__main__":
    main()
