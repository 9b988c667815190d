"""The command line: Lightning's, with this project's modules, DataModule and error messages."""

import errno
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

from jsonargparse import set_parsing_settings
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from transformers.utils import logging as transformers_logging
from typing_extensions import override

from fisher_lit.errors import EngineError, NonFiniteError, UserError
from fisher_lit.modules import PolicyModule
from fisher_lit.rollout import RolloutDataModule
from fisher_lit.rollout.datamodule import require_whole_shares
from fisher_lit.strategies import require_supported_strategy

USAGE = "fisher-lit {} -c CONFIG [-c OVERLAY ...] [--key value ...]"


class RunConfig(SaveConfigCallback):
    """Keeps the whole configuration of a fit as `<log_dir>/config.yaml`."""

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            super().setup(trainer, pl_module, stage)


class FisherLitCLI(LightningCLI):
    """LightningCLI with `fit`, `validate` and `test`; the data's seed follows `seed_everything`."""

    @staticmethod
    @override
    def subcommands() -> dict[str, set[str]]:
        commands = LightningCLI.subcommands()
        return {name: commands[name] for name in ("fit", "validate", "test")}

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.link_arguments("seed_everything", "data.init_args.seed")

    @override
    def instantiate_trainer(self, **kwargs) -> Trainer:
        strategy = self._get(self.config_init, "trainer").strategy
        if isinstance(strategy, str) and strategy.startswith("fsdp") and strategy != "fsdp2":
            # Lightning's own message would be about accelerators.
            raise UserError(f"trainer: strategy {strategy!r} flattens parameters; set `strategy: fsdp2`")
        trainer = super().instantiate_trainer(**kwargs)
        # Before any process is launched and any logger writes.
        require_supported_strategy(trainer)
        require_whole_shares(self.datamodule.prompts_per_update, trainer.world_size)
        self._check_log_dir(Path(trainer.log_dir or trainer.default_root_dir))
        return trainer

    def _check_log_dir(self, log_dir: Path) -> None:
        """Refuse a directory that cannot be written, and a fresh fit in one that holds a run."""
        try:
            log_dir.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=log_dir).close()
        except OSError as error:
            raise UserError(
                f"trainer.logger: the log directory '{log_dir}' cannot be written ({error.strerror}); "
                f"set another `save_dir`"
            ) from error
        is_fresh_fit = self.subcommand == "fit" and self.config.fit.get("ckpt_path") is None
        if is_fresh_fit and (log_dir / "config.yaml").exists():
            raise UserError(
                f"'{log_dir}' already holds a run; continue it with --ckpt_path last, delete it, or give this run "
                f"another name with --trainer.logger.init_args.name NAME"
            )

    @override
    def before_instantiate_classes(self) -> None:
        self.parser.add_instantiator(_instantiate, object)


def main(args: list[str] | dict[str, Any] | None = None) -> None:
    """Run the command line. Bad input prints one line and exits with status 2.

    Args:
        args: arguments in place of the process's own.
    """
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    # A checkpoint holds the state after the update, which is the one to resume from.
    warnings.filterwarnings("ignore", message="Using ModelCheckpoint with manual optimization")
    # Running outside a job on a machine with Slurm is no mistake.
    warnings.filterwarnings("ignore", message="The `srun` command is available")
    transformers_logging.disable_progress_bar()
    try:
        FisherLitCLI(
            PolicyModule,
            RolloutDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            save_config_callback=RunConfig,
            save_config_kwargs={"overwrite": True},
            seed_everything_default=0,
            auto_configure_optimizers=False,
            # Settings come from the command line only; with it, those stored in a checkpoint would replace them.
            load_from_checkpoint_support=False,
            parser_kwargs={name: {"usage": USAGE.format(name)} for name in FisherLitCLI.subcommands()},
            args=args,
        )
    except (EngineError, UserError, NonFiniteError) as error:
        sys.exit(_fail(str(error)))
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        sys.exit(
            _fail(f"no space to write {error.filename or 'the run'} ({error.strerror}); the last checkpoint is intact")
        )


def _instantiate(class_type: type, *args, **kwargs):
    """Make an object of the configuration. jsonargparse would bury a UserError under its own messages."""
    try:
        return class_type(*args, **kwargs)
    except UserError as error:
        sys.exit(_fail(str(error)))


def _fail(message: str) -> int:
    print(f"fisher-lit: error: {message}", file=sys.stderr)
    return 2
