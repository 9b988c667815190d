"""From questions to the token ids of prompts."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from typing_extensions import override

from fisher_lit.errors import UserError
from fisher_lit.problems import Problem

log = logging.getLogger(__name__)

# arXiv 2609.36262, Appendix B.2.
PAPER_PLAIN = "Question:\n{question}\nAnswer:\nLet's think step by step."
PAPER_CHAT = "{question}\nPlease reason step by step, and put your final answer within \\boxed{}."
PLACEHOLDER = "{question}"


@dataclass(frozen=True)
class Prompt:
    """A problem as the model sees it.

    Attributes:
        problem: the problem.
        token_ids: the prompt's tokens; the response starts after the last.
    """

    problem: Problem
    token_ids: tuple[int, ...]


class PromptFormat(ABC):
    """How a question becomes a prompt.

    Args:
        template: text in which `{question}`, which must occur once, stands for the question; other braces are ordinary
            characters.
    """

    def __init__(self, template: str) -> None:
        if template.count(PLACEHOLDER) != 1:
            raise UserError(
                f"prompt_format: a template must contain {PLACEHOLDER} once, but {template!r} does "
                f"{template.count(PLACEHOLDER)} times"
            )
        self.template = template

    def fill(self, question: str) -> str:
        """The template with a question in it."""
        return self.template.replace(PLACEHOLDER, question)

    @abstractmethod
    def encode(self, tokenizer: PreTrainedTokenizerBase, question: str) -> list[int]:
        """Token ids of the prompt for a question."""


class PlainPrompt(PromptFormat):
    """Plain text, for base models.

    The tokenizer adds the special tokens that it adds by default, such as a beginning-of-sequence token; an
    end-of-sequence token that it appends is taken off, since the response continues the text.

    Args:
        template: text in which `{question}` stands for the question; the default is the paper's (arXiv 2609.36262,
            Appendix B.2).
    """

    def __init__(self, template: str = PAPER_PLAIN) -> None:
        super().__init__(template)

    @override
    def encode(self, tokenizer: PreTrainedTokenizerBase, question: str) -> list[int]:
        text = self.fill(question)
        ids = list(tokenizer(text)["input_ids"])
        if ids and ids[-1] == tokenizer.eos_token_id and not text.endswith(tokenizer.eos_token):
            ids.pop()
        return ids


class ChatPrompt(PromptFormat):
    """One user message in the tokenizer's chat template, up to where the assistant's answer starts.

    The chat template writes all special tokens; none is added to them.

    Args:
        message: the user message, in which `{question}` stands for the question; the default is the paper's (arXiv
            2609.36262, Appendix B.2).
        enable_thinking: passed to the chat template; one that does not know it ignores it.
        system: system message before it; null writes none.
    """

    # Not `template`: when a configuration changes the class, jsonargparse carries values of equal name over.
    def __init__(self, message: str = PAPER_CHAT, enable_thinking: bool = False, system: str | None = None) -> None:
        super().__init__(message)
        self.enable_thinking = enable_thinking
        self.system = system

    @override
    def encode(self, tokenizer: PreTrainedTokenizerBase, question: str) -> list[int]:
        if not tokenizer.chat_template:
            raise UserError(
                "prompt_format: the tokenizer has no chat template, which ChatPrompt needs; use "
                "fisher_lit.prompts.PlainPrompt or the tokenizer of a chat model"
            )
        messages = [{"role": "user", "content": self.fill(question)}]
        if self.system is not None:
            messages.insert(0, {"role": "system", "content": self.system})
        try:
            text = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, enable_thinking=self.enable_thinking, tokenize=False
            )
        except TemplateError as error:
            raise UserError(f"prompt_format: the chat template of the tokenizer refuses the prompt: {error}") from error
        assert isinstance(text, str)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def encode_problems(
    problems: Sequence[Problem],
    prompt_format: PromptFormat,
    tokenizer: PreTrainedTokenizerBase,
    max_prompt_tokens: int,
) -> list[Prompt]:
    """Prompts of problems, without those over a limit, which one warning counts.

    Args:
        problems: at least one problem.
        prompt_format: how a question becomes a prompt.
        tokenizer: the model's tokenizer.
        max_prompt_tokens: the longest prompt to keep, in tokens.

    Returns:
        The prompts, in the order of the problems.

    Raises:
        UserError: if a prompt is empty or ends with the end-of-sequence token, or if all are over the limit.
    """
    assert problems, "a source of problems has at least one"
    prompts = [Prompt(p, tuple(prompt_format.encode(tokenizer, p.question))) for p in problems]
    for prompt in prompts:
        if not prompt.token_ids or prompt.token_ids[-1] == tokenizer.eos_token_id:
            fault = "ends with the end-of-sequence token" if prompt.token_ids else "has no tokens"
            raise UserError(
                f"prompt_format: the prompt of problem '{prompt.problem.id}' {fault}, so no response can follow; "
                f"change its template"
            )
    lengths = [len(prompt.token_ids) for prompt in prompts]
    kept = [prompt for prompt in prompts if len(prompt.token_ids) <= max_prompt_tokens]
    if not kept:
        raise UserError(
            f"data: all {len(prompts)} prompts are longer than `max_prompt_tokens` ({max_prompt_tokens}); the shortest "
            f"has {min(lengths)} tokens"
        )
    if len(kept) < len(prompts):
        log.warning(
            "%d of %d prompts are longer than `max_prompt_tokens` (%d) and left out; the longest has %d tokens",
            len(prompts) - len(kept),
            len(prompts),
            max_prompt_tokens,
            max(lengths),
        )
    return kept
