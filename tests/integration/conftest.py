import pytest

from fisher_lit.cli import main
from integration.helpers import QUICKSTART


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Call the command line in this process with a scratch log directory; returns the run's directory."""
    monkeypatch.chdir(tmp_path)

    def call(command, *args, config=QUICKSTART, name="run"):
        logger = [
            "--trainer.logger.init_args.save_dir",
            str(tmp_path),
            "--trainer.logger.init_args.name",
            name,
        ]
        main([command, "-c", str(config), *logger, *map(str, args)])
        return tmp_path / name

    return call
