import logging

import pytest
from jsonargparse import ArgumentParser, lazy_instance
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from fisher_lit.errors import UserError
from fisher_lit.problems import Problem
from fisher_lit.prompts import ChatPrompt, PlainPrompt, Prompt, PromptFormat, encode_problems

SPECIAL = ["<s>", "</s>", "<|start|>", "<|end|>", "<think>", "</think>"]
# Thinks unless told not to, like the chat template of Qwen3.
CHAT_TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + CHAT_TEMPLATE
PLAIN = "Question:\n1 + 1\nAnswer:\nLet's think step by step."
USER = "1 + 1\nPlease reason step by step, and put your final answer within \\boxed{}."


def byte_tokenizer(before="", after="", chat_template=CHAT_TEMPLATE):
    """One token per UTF-8 byte; `before` and `after` are special tokens put around every text."""
    vocabulary = {token: i for i, token in enumerate(SPECIAL + sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{before} $A {after}".strip(), special_tokens=[(token, vocabulary[token]) for token in SPECIAL]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        extra_special_tokens=SPECIAL[2:],
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
    )


def decoded(tokenizer, ids):
    return tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("after", ["", "</s>"])
@pytest.mark.parametrize("before", ["", "<s>"])
def test_plain_prompt_of_the_paper(before, after):
    tokenizer = byte_tokenizer(before, after)
    ids = PlainPrompt().encode(tokenizer, "1 + 1")
    assert decoded(tokenizer, ids) == before + PLAIN
    assert len(ids) == bool(before) + len(PLAIN)


@pytest.mark.parametrize("before", ["", "<s>"])
def test_chat_prompt_of_the_paper(before):
    """The template writes the special tokens; what the tokenizer puts around texts is not added."""
    tokenizer = byte_tokenizer(before, "</s>", chat_template=("{{ bos_token }}" if before else "") + CHAT_TEMPLATE)
    ids = ChatPrompt().encode(tokenizer, "1 + 1")
    want = f"{before}<|start|>user\n{USER}<|end|>\n<|start|>assistant\n<think>\n\n</think>\n\n"
    assert decoded(tokenizer, ids) == want
    assert ids.count(tokenizer.bos_token_id) == bool(before)
    assert [i for i in ids if i < len(SPECIAL)] == [0] * bool(before) + [2, 3, 2, 4, 5]


def test_chat_prompt_with_thinking_and_system():
    tokenizer = byte_tokenizer()
    ids = ChatPrompt("{question}", enable_thinking=True, system="Be brief.").encode(tokenizer, "1 + 1")
    assert decoded(tokenizer, ids) == (
        "<|start|>system\nBe brief.<|end|>\n<|start|>user\n1 + 1<|end|>\n<|start|>assistant\n"
    )
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1"}]
    library = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True)
    assert ids == library["input_ids"]


@pytest.mark.parametrize("question", ["{x} {} %s \\1 {question}", "  é\t√2\n\n中文  ", "{{question}}"])
def test_questions_are_put_in_as_they_are(question):
    tokenizer = byte_tokenizer()
    template = "{a} {question} {{b}} \\boxed{}"
    ids = PlainPrompt(template).encode(tokenizer, question)
    assert decoded(tokenizer, ids) == "{a} " + question + " {{b}} \\boxed{}"
    assert len(ids) == len(("{a} " + question + " {{b}} \\boxed{}").encode())
    chat = decoded(tokenizer, ChatPrompt(template).encode(tokenizer, question))
    assert "<|start|>user\n{a} " + question + " {{b}} \\boxed{}<|end|>\n" in chat


@pytest.mark.parametrize("make", [PlainPrompt, ChatPrompt])
@pytest.mark.parametrize(("template", "times"), [("no place", 0), ("{ question }", 0), ("{question} or {question}", 2)])
def test_template_needs_one_place(make, template, times):
    with pytest.raises(UserError, match=rf"must contain \{{question\}} once, but '.*' does {times} times"):
        make(template)


def test_tokenizer_without_chat_template():
    with pytest.raises(UserError, match=r"no chat template.*use fisher_lit\.prompts\.PlainPrompt"):
        ChatPrompt().encode(byte_tokenizer(chat_template=None), "1 + 1")


def test_chat_template_that_refuses():
    tokenizer = byte_tokenizer(chat_template=NO_SYSTEM)
    assert ChatPrompt().encode(tokenizer, "1 + 1") == ChatPrompt().encode(byte_tokenizer(), "1 + 1")
    with pytest.raises(UserError, match="refuses the prompt: no system role"):
        ChatPrompt(system="x").encode(tokenizer, "1 + 1")


def problems(*lengths):
    return [Problem(f"p:{i}", "7" * length, "0") for i, length in enumerate(lengths)]


def test_long_prompts_are_left_out_with_one_warning(caplog):
    tokenizer = byte_tokenizer("<s>")
    given = problems(3, 9, 1, 4, 5, 20)
    with caplog.at_level(logging.WARNING):
        got = encode_problems(given, PlainPrompt("{question}="), tokenizer, max_prompt_tokens=6)
    # A beginning-of-sequence token and the equals sign make two more tokens.
    assert [p.problem for p in got] == [given[i] for i in (0, 2, 3)]
    assert all(isinstance(p, Prompt) and isinstance(p.token_ids, tuple) for p in got)
    assert [decoded(tokenizer, list(p.token_ids)) for p in got] == ["<s>777=", "<s>7=", "<s>7777="]
    assert caplog.messages == [
        "3 of 6 prompts are longer than `max_prompt_tokens` (6) and left out; the longest has 22 tokens"
    ]


def test_no_warning_when_all_fit(caplog):
    with caplog.at_level(logging.WARNING):
        assert len(encode_problems(problems(3, 4), PlainPrompt("{question}"), byte_tokenizer(), 4)) == 2
    assert not caplog.messages


def test_all_prompts_too_long():
    with pytest.raises(UserError, match=r"all 2 prompts are longer than `max_prompt_tokens` \(2\); the shortest has 3"):
        encode_problems(problems(3, 4), PlainPrompt("{question}"), byte_tokenizer(), 2)


@pytest.mark.parametrize(
    ("prompt_format", "after", "chat_template"),
    [
        (PlainPrompt("{question}</s>"), "", None),
        (PlainPrompt("{question}</s>"), "</s>", None),
        (ChatPrompt(), "", "{% for m in messages %}{{ m.content }}</s>{% endfor %}"),
    ],
)
def test_prompt_must_not_end_the_sequence(prompt_format, after, chat_template):
    tokenizer = byte_tokenizer(after=after, chat_template=chat_template)
    with pytest.raises(UserError, match="the prompt of problem 'p:0' ends with the end-of-sequence token"):
        encode_problems(problems(3), prompt_format, tokenizer, 100)


def test_prompt_without_tokens():
    with pytest.raises(UserError, match="the prompt of problem 'p:0' has no tokens"):
        encode_problems(problems(0), PlainPrompt("{question}"), byte_tokenizer(), 100)


def test_tokenizer_without_end_token(tokenizer):
    tokenizer.eos_token = None
    (prompt,) = encode_problems(problems(2), PlainPrompt("{question}="), tokenizer, 100)
    assert tokenizer.decode(list(prompt.token_ids)) == "77="


def test_changing_the_class_takes_the_other_template():
    """A configuration that replaces a plain prompt must not hand its template to the chat prompt."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--prompt_format", type=PromptFormat, default=lazy_instance(PlainPrompt))
    for args in ([], ["--prompt_format", "PlainPrompt", "--prompt_format.template", "{question}="]):
        chosen = parser.instantiate(parser.parse_args([*args, "--prompt_format", "ChatPrompt"])).prompt_format
        assert isinstance(chosen, ChatPrompt)
        assert chosen.fill("1 + 1") == USER
    assert parser.instantiate(parser.parse_args([])).prompt_format.fill("1 + 1") == PLAIN
