"""The DataModule that every objective and every analysis draws its rollouts from."""

import logging
import math
import time
from collections.abc import Callable, Sequence

from lightning.pytorch import LightningDataModule, Trainer
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from typing_extensions import override

from fisher_lit.errors import UserError
from fisher_lit.problems import ProblemSource
from fisher_lit.prompts import PlainPrompt, Prompt, PromptFormat, encode_problems
from fisher_lit.rewards import MathReward
from fisher_lit.rollout.analysis_samples import AnalysisSamples
from fisher_lit.rollout.batch import Rollout, RolloutBatch
from fisher_lit.rollout.engine import Engine, SampleRequest
from fisher_lit.rollout.exchange import count_over_processes
from fisher_lit.rollout.prompt_loaders import EvalLoader, PromptBatch, PromptLoader
from fisher_lit.rollout.sampling import Sampling, derive_seed
from fisher_lit.rollout.transformers_engine import TransformersEngine
from fisher_lit.sharding import gathered
from fisher_lit.strategies import require_supported_strategy

log = logging.getLogger(__name__)


class RolloutDataModule(LightningDataModule):
    """Prompts, responses drawn from the current weights, and rewards.

    One training batch holds the rollouts of one optimizer update. They are generated when the batch reaches the
    device, right before the update, never in a prefetching loader, so they always come from the current policy.

    Args:
        train: problems to train on.
        val: problems for `fit` and `validate`.
        test: problems for `test`.
        prompt_format: how a question becomes a prompt; null is `PlainPrompt`, the paper's plain text.
        engine: what draws the responses; null is `TransformersEngine`.
        reward: judges answers; null is `MathReward` with its defaults.
        prompts_per_update: prompts of one optimizer update.
        responses_per_prompt: responses to each of them.
        max_prompt_tokens: longer prompts are left out, with one warning that counts them.
        max_response_tokens: the horizon; longer responses are cut and kept.
        sampling: how training tokens are drawn.
        eval_responses_per_prompt: k, responses to each evaluation problem.
        eval_sampling: how evaluation tokens are drawn.
        eval_seed: response j of an evaluation problem is drawn with seed `eval_seed` + j.
        eval_prompts_per_batch: evaluation problems drawn at a time.
        stop_tokens: tokens that end a response; null takes the tokenizer's end-of-sequence token.
        analysis: prompts and seeds of the analyses' own samples.
        seed: seed of prompt order and training responses; the command line sets it to `seed_everything`.
    """

    def __init__(
        self,
        train: ProblemSource | None = None,
        val: ProblemSource | None = None,
        test: ProblemSource | None = None,
        prompt_format: PromptFormat | None = None,
        engine: Engine | None = None,
        reward: MathReward | None = None,
        prompts_per_update: int = 4,
        responses_per_prompt: int = 8,
        max_prompt_tokens: int = 1024,
        max_response_tokens: int = 4096,
        sampling: Sampling = Sampling(),
        eval_responses_per_prompt: int = 4,
        eval_sampling: Sampling = Sampling(),
        eval_seed: int = 300,
        eval_prompts_per_batch: int = 64,
        stop_tokens: list[str] | None = None,
        analysis: AnalysisSamples = AnalysisSamples(),
        seed: int = 0,
    ) -> None:
        super().__init__()
        for name, value in {
            "prompts_per_update": prompts_per_update,
            "responses_per_prompt": responses_per_prompt,
            "max_prompt_tokens": max_prompt_tokens,
            "max_response_tokens": max_response_tokens,
            "eval_responses_per_prompt": eval_responses_per_prompt,
            "eval_prompts_per_batch": eval_prompts_per_batch,
        }.items():
            if value < 1:
                raise UserError(f"data: `{name}` must be at least 1, got {value}")
        self.sources = {"train": train, "val": val, "test": test}
        self.prompt_format = prompt_format or PlainPrompt()
        self.engine = engine or TransformersEngine()
        self.reward = reward or MathReward()
        self.prompts_per_update = prompts_per_update
        self.responses_per_prompt = responses_per_prompt
        self.max_prompt_tokens = max_prompt_tokens
        self.max_response_tokens = max_response_tokens
        self.sampling = sampling
        self.eval_responses_per_prompt = eval_responses_per_prompt
        self.eval_sampling = eval_sampling
        self.eval_seed = eval_seed
        self.eval_prompts_per_batch = eval_prompts_per_batch
        self.stop_tokens = stop_tokens
        self.analysis = analysis
        self.seed = seed
        self.prompts: dict[str, list[Prompt]] = {}
        # What the analyses of a fit share; it lives as long as the samples that it is made from.
        self.measurements: object | None = None

    @override
    def setup(self, stage: str) -> None:
        require_supported_strategy(self._trainer)
        require_whole_shares(self.prompts_per_update, self._trainer.world_size)
        self.tokenizer: PreTrainedTokenizerBase = self._trainer.lightning_module.tokenizer  # type: ignore[assignment]
        self.stop_ids = _stop_ids(self.tokenizer, self.stop_tokens)
        self._check_room()
        for split in {"fit": ("train", "val"), "validate": ("val",), "test": ("test",)}[stage]:
            source = self.sources[split]
            if source is not None and split not in self.prompts:
                self.prompts[split] = encode_problems(
                    source.load(), self.prompt_format, self.tokenizer, self.max_prompt_tokens
                )
        if stage != "fit" and not self.prompts:
            split = {"validate": "val", "test": "test"}[stage]
            raise UserError(f"data: `{stage}` needs a source of problems; set `data.init_args.{split}`")
        if stage == "fit" and len(self.prompts.get("train", ())) < self.prompts_per_update:
            raise UserError(
                f"data: `train` gives {len(self.prompts.get('train', ()))} prompts, fewer than the "
                f"{self.prompts_per_update} of `prompts_per_update`; set a larger source or fewer prompts"
            )

    def _check_room(self) -> None:
        limit = getattr(self._trainer.lightning_module.config, "max_position_embeddings", None)
        if limit is not None and self.max_prompt_tokens + self.max_response_tokens > limit:
            raise UserError(
                f"data: `max_prompt_tokens` ({self.max_prompt_tokens}) + `max_response_tokens` "
                f"({self.max_response_tokens}) is more than the model's {limit} positions; lower one of them"
            )

    @override
    def train_dataloader(self) -> PromptLoader:
        return PromptLoader(
            self.prompts["train"], self.prompts_per_update, self.seed, lambda: self._trainer.global_step
        )

    @override
    def val_dataloader(self) -> EvalLoader | list:
        return self._eval_loader("val")

    @override
    def test_dataloader(self) -> EvalLoader | list:
        return self._eval_loader("test")

    def _eval_loader(self, split: str) -> EvalLoader | list:
        # An empty list tells Lightning that there is nothing to evaluate.
        return EvalLoader(self.prompts[split], self.eval_prompts_per_batch) if split in self.prompts else []

    @override
    def transfer_batch_to_device(self, batch: PromptBatch, device, dataloader_idx: int) -> PromptBatch:
        return batch

    @override
    def on_after_batch_transfer(self, batch: PromptBatch, dataloader_idx: int) -> RolloutBatch:
        if batch.update is None:
            return self.eval_batch(batch.prompts)
        rollouts = self.train_batch(batch.prompts, batch.update)
        count_over_processes(rollouts, self._trainer.strategy.root_device)
        return rollouts

    def train_batch(self, prompts: Sequence[Prompt], update: int) -> RolloutBatch:
        """This process's rollouts of one optimizer update, from the current weights."""
        return self.draw(
            prompts,
            self.responses_per_prompt,
            self.sampling,
            lambda problem_id, j: derive_seed("train", self.seed, update, problem_id, j),
            judge=bool(self._trainer.lightning_module.uses_rewards),
        )

    def objective_batch(self, on_policy: RolloutBatch) -> RolloutBatch:
        """Responses that the gradient is a mean over, given on-policy ones; an on-policy objective takes those."""
        return on_policy

    def eval_batch(self, prompts: Sequence[Prompt]) -> RolloutBatch:
        """k responses to each of some evaluation problems, from the current weights."""
        return self.draw(
            prompts,
            self.eval_responses_per_prompt,
            self.eval_sampling,
            lambda problem_id, j: derive_seed("eval", self.eval_seed + j, problem_id),
        )

    def draw(
        self,
        prompts: Sequence[Prompt],
        responses_per_prompt: int,
        sampling: Sampling,
        seed: Callable[[str, int], int],
        progress: Callable[[int], None] | None = None,
        judge: bool = True,
    ) -> RolloutBatch:
        """Draw responses from the module's current weights, and judge them. All processes call this together.

        Args:
            prompts: this process's prompts; none is fine.
            responses_per_prompt: responses to each of them.
            sampling: how tokens are drawn.
            seed: seed of response j to the problem with an id.
            progress: called with the number of responses just finished.
            judge: whether the answers are judged; otherwise rewards are NaN.

        Returns:
            The rollouts, those to one prompt next to each other.
        """
        requests = [
            SampleRequest(p.token_ids, seed(p.problem.id, j)) for p in prompts for j in range(responses_per_prompt)
        ]
        started = time.perf_counter()
        model: PreTrainedModel = self._trainer.lightning_module.model  # type: ignore[assignment]
        # Processes may draw other numbers of tokens, so nothing inside waits for another process.
        with gathered(model), self._trainer.precision_plugin.forward_context():
            self.engine.sync_weights(model)
            samples = self.engine.generate(
                requests,
                sampling=sampling,
                max_new_tokens=self.max_response_tokens,
                stop_ids=self.stop_ids,
                progress=progress,
            )
        generated = time.perf_counter()
        texts = [str(self.tokenizer.decode(list(s.token_ids), skip_special_tokens=True)) for s in samples]
        problems = [p.problem for p in prompts for _ in range(responses_per_prompt)]
        timeouts = self.reward.num_timeouts
        rewards = self.reward(texts, [p.answer for p in problems]) if judge else [math.nan] * len(texts)
        rollouts = [
            Rollout(
                problem_id=problem.id,
                question=problem.question,
                gold=problem.answer,
                sample=i % responses_per_prompt,
                prompt_ids=request.prompt_ids,
                response_ids=sample.token_ids,
                logprobs=sample.logprobs,
                finish_reason=sample.finish_reason,
                text=text,
                reward=reward,
            )
            for i, (problem, request, sample, text, reward) in enumerate(
                zip(problems, requests, samples, texts, rewards, strict=True)
            )
        ]
        return RolloutBatch(
            rollouts,
            responses_per_prompt,
            horizon=self.max_response_tokens,
            temperature=sampling.temperature,
            seconds={"generation": generated - started, "reward": time.perf_counter() - generated},
            num_reward_timeouts=self.reward.num_timeouts - timeouts,
        )

    @property
    def _trainer(self) -> Trainer:
        assert self.trainer is not None, "the DataModule belongs to a Trainer"
        return self.trainer

    @override
    def teardown(self, stage: str) -> None:
        self.reward.close()


def require_whole_shares(prompts_per_update: int, num_processes: int) -> None:
    """Refuse an update whose prompts cannot be shared equally.

    Raises:
        UserError: naming both numbers.
    """
    if prompts_per_update % num_processes:
        raise UserError(
            f"data: `prompts_per_update` is {prompts_per_update}, which {num_processes} processes cannot share "
            f"equally; set a multiple of {num_processes}, or another number of devices"
        )


def _stop_ids(tokenizer, stop_tokens: list[str] | None) -> frozenset[int]:
    if stop_tokens is None:
        if tokenizer.eos_token_id is None:
            raise UserError(
                "tokenizer: it has no end-of-sequence token, so no response would ever stop; name the tokens "
                "that end a response in `data.init_args.stop_tokens`"
            )
        return frozenset([tokenizer.eos_token_id])
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in stop_tokens}
    unknown = [token for token, i in ids.items() if i is None or i == tokenizer.unk_token_id]
    if unknown or not ids:
        raise UserError(f"data: `stop_tokens` {stop_tokens}: {unknown or 'an empty list'} not in the vocabulary")
    return frozenset(ids.values())
