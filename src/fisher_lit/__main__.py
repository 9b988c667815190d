"""`fisher-lit` and `python -m fisher_lit`: the command line, in an environment where every import works."""

from fisher_lit.optional_packages import hide_broken_packages


def main() -> None:
    """Run the command line."""
    hide_broken_packages()
    from fisher_lit.cli import main as run

    run()


if __name__ == "__main__":
    main()
