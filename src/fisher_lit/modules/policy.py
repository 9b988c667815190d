"""The LightningModule that all objectives share: a causal LM, one optimizer update per batch, evaluation."""

import math
import time
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedModel
from typing_extensions import override

from fisher_lit.errors import NonFiniteError, UserError
from fisher_lit.evaluation import Evaluation
from fisher_lit.logprobs import TokenScores, response_logprobs
from fisher_lit.models import load_config, load_model, load_tokenizer, resolve_model
from fisher_lit.modules.layout import scalar_layout
from fisher_lit.modules.statistics import UpdateStatistics, batch_statistics, check_logprob_gap
from fisher_lit.rollout.batch import DUMMY, MicroBatch, RolloutBatch, collate, split_micro_batches
from fisher_lit.rollout.datamodule import RolloutDataModule
from fisher_lit.rollout.exchange import gather_batch
from fisher_lit.sharding import largest, whole
from fisher_lit.strategies import FSDP2Strategy

NUM_EXAMPLES = 4


class PolicyModule(LightningModule):
    """A causal LM that gets one optimizer update per batch of rollouts.

    Args:
        model: a Hugging Face causal LM: a directory, a hub name, or `tiny-base`, which is shipped with the package.
        optimizer: the optimizer; the default is the paper's (Table 6).
        lr_scheduler: a schedule stepped once per update; null keeps the learning rate constant.
        micro_batch_responses: responses per forward and backward. Sequences of similar length share a micro-batch.
        micro_batch_tokens: in its place, tokens per forward and backward, padding included.
        gradient_clip: largest global gradient norm, applied after any mask; null does not clip.
        logprob_chunk_tokens: response tokens whose logits exist at a time.
        gradient_checkpointing: keep only layer inputs for the backward pass; slower, with less memory.
        random_init: random weights by the model's config, in place of its trained ones.
        logprob_gap_warn: mean |log p_sampler − log p_trainer| of an update, nats per token, above which it warns;
            null does not.
        logprob_gap_stop: the same, above which training stops before the update; null does not.
    """

    def __init__(
        self,
        model: str,
        optimizer: OptimizerCallable = lambda params: torch.optim.AdamW(
            params, lr=5e-7, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0
        ),
        lr_scheduler: LRSchedulerCallable | None = None,
        micro_batch_responses: int | None = 4,
        micro_batch_tokens: int | None = None,
        gradient_clip: float | None = 1.0,
        logprob_chunk_tokens: int = 1024,
        gradient_checkpointing: bool = False,
        random_init: bool = False,
        logprob_gap_warn: float | None = 0.05,
        logprob_gap_stop: float | None = 0.5,
    ) -> None:
        super().__init__()
        # An update is several backward passes and one step.
        self.automatic_optimization = False
        split_micro_batches([1], max_responses=micro_batch_responses, max_tokens=micro_batch_tokens)
        if gradient_clip is not None and not gradient_clip > 0:
            raise UserError(f"model: `gradient_clip` must be above 0, got {gradient_clip}; null does not clip")
        if logprob_chunk_tokens < 1:
            raise UserError(f"model: `logprob_chunk_tokens` must be at least 1, got {logprob_chunk_tokens}")
        self.model_path = resolve_model(model)
        self.make_optimizer = optimizer
        self.make_lr_scheduler = lr_scheduler
        self.micro_batch_responses = micro_batch_responses
        self.micro_batch_tokens = micro_batch_tokens
        self.gradient_clip = gradient_clip
        self.logprob_chunk_tokens = logprob_chunk_tokens
        self.gradient_checkpointing = gradient_checkpointing
        self.random_init = random_init
        for name, bound in {"logprob_gap_warn": logprob_gap_warn, "logprob_gap_stop": logprob_gap_stop}.items():
            if bound is not None and not bound > 0:
                raise UserError(f"model: `{name}` must be above 0, got {bound}; null turns it off")
        self.logprob_gap_warn = logprob_gap_warn
        self.logprob_gap_stop = logprob_gap_stop
        self.config = load_config(self.model_path)
        self.tokenizer = load_tokenizer(self.model_path)
        self.model: PreTrainedModel | None = None
        self.evaluation = Evaluation()
        self._gradient_norm = float("nan")

    # Whether training responses are judged; an objective without rewards saves the time.
    uses_rewards = True

    @abstractmethod
    def loss(self, scores: TokenScores, micro: MicroBatch, indices: Sequence[int], batch: RolloutBatch) -> Tensor:
        """The micro-batch's share of the update's loss: a sum divided by a count of the whole update.

        Args:
            scores: scores of the micro-batch's response tokens under the current weights.
            micro: the micro-batch.
            indices: which rollouts of the batch its rows are.
            batch: all rollouts of the update.
        """

    @abstractmethod
    def signal(self, batch: RolloutBatch) -> list[Tensor | float]:
        """The objective's weight of each response's token scores: one number, or one per token [tokens].

        The gradient of the objective is E[Σ_t w_t ∂ log p(y_t | s_t)], without the loss' division by counts.
        """

    def effective_signal(self, batch: RolloutBatch) -> list[float]:
        """a(x, y) of each response such that the objective's gradient is E[a h] (Table 2); here, the signal itself."""
        signal = self.signal(batch)
        assert all(isinstance(a, float) for a in signal), (
            "an objective that weights tokens has another effective signal"
        )
        return signal  # type: ignore[return-value]

    def prepare(self, batch: RolloutBatch) -> None:
        """Add to a training batch what the loss needs beyond the rollouts."""

    def has_gradient(self, batch: RolloutBatch) -> list[bool]:
        """Whether each rollout can have a gradient at all; the others are scored without a backward pass."""
        return [True] * len(batch.rollouts)

    def batch_metrics(self, batch: RolloutBatch) -> dict[str, float]:
        """Numbers about a training batch that do not need its scores."""
        return batch_statistics(batch)

    @property
    def data(self) -> RolloutDataModule:
        """The trainer's DataModule."""
        return self.trainer.datamodule  # type: ignore[attr-defined]

    @override
    def setup(self, stage: str) -> None:
        if self.trainer.precision not in ("32-true", "64-true", "bf16-mixed"):
            raise UserError(
                f"trainer: precision {self.trainer.precision!r} does not keep fp32 parameters; "
                f"use '32-true', or 'bf16-mixed' for bf16 computation"
            )
        responses = self.data.prompts_per_update * self.data.responses_per_prompt
        if stage == "fit" and (self.micro_batch_responses or 0) > responses:
            raise UserError(
                f"model: `micro_batch_responses` ({self.micro_batch_responses}) is more than the {responses} responses "
                f"of an update; lower it to {responses} or less"
            )

    @override
    def configure_model(self) -> None:
        if self.model is None:
            self.model = load_model(self.model_path, self.config, random_init=self.random_init)
            if self.gradient_checkpointing:
                self.model.gradient_checkpointing_enable({"use_reentrant": False})
            if isinstance(self.trainer.strategy, FSDP2Strategy):
                self.trainer.strategy.shard(self.model)

    @override
    def configure_optimizers(self):
        optimizer = self.make_optimizer(self.parameters())
        if self.make_lr_scheduler is None:
            return optimizer
        return [optimizer], [self.make_lr_scheduler(optimizer)]

    @override
    def on_fit_start(self) -> None:
        for logger in self.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_custom_scalars(scalar_layout(self.trainer))

    @override
    def on_save_checkpoint(self, checkpoint: dict) -> None:
        # What a checkpoint has behind it must be on disk, or a killed run would lose its curves.
        for logger in self.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.flush()

    @override
    def training_step(self, batch: RolloutBatch, batch_idx: int) -> None:
        started = time.perf_counter()
        optimizer, scheduler = self.optimizers(), self.lr_schedulers()
        assert isinstance(optimizer, LightningOptimizer), "one optimizer per policy"
        optimizer.zero_grad()
        self.prepare(batch)
        measured = self.accumulate_gradients(batch).compute()
        if "logprob_gap_mean" in measured:
            check_logprob_gap(
                measured["logprob_gap_mean"],
                warn=self.logprob_gap_warn,
                stop=self.logprob_gap_stop,
                update=self.global_step,
            )
        optimizer.step()
        # As one process would have it, so that every process reports the same.
        batch = gather_batch(batch)
        values = self.batch_metrics(batch) | measured
        values |= {"gradient_norm": self._gradient_norm, "lr": optimizer.param_groups[0]["lr"]}
        if isinstance(scheduler, LRScheduler):
            scheduler.step()
        self._log_update(batch, values, time.perf_counter() - started)

    def accumulate_gradients(self, batch: RolloutBatch) -> UpdateStatistics:
        """Add the gradient of the update's loss to `.grad`, micro-batch by micro-batch."""
        statistics = UpdateStatistics(self.device)
        needs_gradient = self.has_gradient(batch)
        for active in (True, False):
            chosen = [i for i, needed in enumerate(needs_gradient) if needed == active]
            for group in self.micro_batches([batch.rollouts[i].num_tokens for i in chosen]):
                indices = [chosen[i] for i in group]
                with torch.set_grad_enabled(active):
                    loss = self._score(batch, indices, statistics) if indices else self._nothing()
                if active:
                    self.manual_backward(loss)
        return statistics

    def micro_batches(self, lengths: Sequence[int]) -> list[list[int]]:
        """Split sequences of these lengths (tokens) by the module's limit.

        Every process gets equally many micro-batches, as each is a pass through a model that they share; where one has
        too few sequences, some of its micro-batches are empty.
        """
        groups = split_micro_batches(
            lengths, max_responses=self.micro_batch_responses, max_tokens=self.micro_batch_tokens
        )
        return groups + [[]] * (largest(len(groups), self.device) - len(groups))

    def _nothing(self) -> Tensor:
        """A loss of 0 that passes through the whole model: an empty micro-batch."""
        assert self.model is not None
        scores = response_logprobs(self.model, collate([DUMMY], pad_id=0, device=self.device))
        return 0 * scores.logprobs.sum()

    def forward_loss(
        self, micro: MicroBatch, indices: Sequence[int], batch: RolloutBatch
    ) -> tuple[Tensor, TokenScores]:
        """Score a micro-batch under the current weights and take its share of the loss."""
        assert self.model is not None
        scores = response_logprobs(
            self.model, micro, temperature=batch.temperature, chunk_tokens=self.logprob_chunk_tokens
        )
        return self.loss(scores, micro, indices, batch), scores

    def require_full_softmax(self) -> None:
        """Refuse training responses from a cut or greedy distribution, of which no gradient here is an expectation."""
        if not self.data.sampling.is_full_softmax:
            raise UserError(
                f"data: {type(self).__name__} needs responses from the full softmax, but `sampling` is "
                f"{self.data.sampling}; set a temperature above 0, top_p 1, top_k null and min_p 0"
            )

    def _score(self, batch: RolloutBatch, indices: list[int], statistics: UpdateStatistics) -> Tensor:
        micro = collate(
            [batch.rollouts[i] for i in indices], pad_id=self.tokenizer.pad_token_id or 0, device=self.device
        )
        loss, scores = self.forward_loss(micro, indices, batch)
        if not torch.isfinite(loss):
            raise NonFiniteError(
                f"the loss of update {self.global_step} is {float(loss.detach())}; training stopped before this "
                f"update. Resume from the last checkpoint with a lower learning rate"
            )
        statistics.add(loss, scores, micro)
        return loss

    @override
    def on_before_optimizer_step(self, optimizer) -> None:
        # Lightning calls callbacks before this hook, so a mask has zeroed its gradients by now.
        norm = torch.nn.utils.clip_grad_norm_(self.parameters(), self.gradient_clip or math.inf)
        self._gradient_norm = float(whole(norm))
        if not math.isfinite(self._gradient_norm):
            raise NonFiniteError(
                f"the gradient norm of update {self.global_step} is {self._gradient_norm}; training stopped before "
                f"this update. Resume from the last checkpoint with a lower learning rate"
            )

    def _log_update(self, batch: RolloutBatch, values: dict[str, float], update_seconds: float) -> None:
        seconds = batch.seconds | {"update": update_seconds}
        perf = {f"perf/seconds_{phase}": value for phase, value in seconds.items()}
        perf["perf/tokens_per_second"] = batch.num_response_tokens / sum(seconds.values())
        size = len(batch.rollouts)
        self.log_dict({f"train/{name}": value for name, value in values.items()} | perf, batch_size=size)
        shown = "reward" if "reward" in values else "loss"
        self.log(shown, values[shown], prog_bar=True, logger=False, batch_size=size)

    @override
    def on_validation_epoch_start(self) -> None:
        self.evaluation.reset()

    @override
    def on_test_epoch_start(self) -> None:
        self.evaluation.reset()

    @override
    def validation_step(self, batch: RolloutBatch, batch_idx: int) -> None:
        self.evaluation.update(batch)

    @override
    def test_step(self, batch: RolloutBatch, batch_idx: int) -> None:
        self.evaluation.update(batch)

    @override
    def on_validation_epoch_end(self) -> None:
        self._report_evaluation("val")

    @override
    def on_test_epoch_end(self) -> None:
        self._report_evaluation("test")

    def _report_evaluation(self, split: str) -> None:
        values = self.evaluation.compute()
        tagged = {f"{split}/{name}": value for name, value in values.items()}
        self.log_dict(tagged, logger=False, sync_dist=True)
        for logger in self.loggers:
            # Lightning would put an evaluation after n updates at step n − 1.
            logger.log_metrics(tagged, self.global_step)
        shown = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
        self.print(f"step {self.global_step} {split}: {shown}")
        log_dir = Path(self.trainer.log_dir or self.trainer.default_root_dir)
        if self.trainer.is_global_zero:
            self.evaluation.write_completions(log_dir / "completions" / f"{split}_step_{self.global_step:06d}.jsonl")
        for logger in self.loggers:
            if isinstance(logger, TensorBoardLogger):
                text = self.evaluation.examples(NUM_EXAMPLES)
                logger.experiment.add_text(f"{split}/completions", text, self.global_step)


def require_importance_cap(cap: float | None) -> None:
    """Refuse a cap of importance weights below 1, which would shrink every term. Raises UserError."""
    if cap is not None and not cap >= 1:
        raise UserError(f"model: `importance_cap` must be at least 1, got {cap}; null turns it off")
