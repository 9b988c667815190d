import itertools
import json
import logging
import math
from collections import Counter
from fractions import Fraction

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonargparse import ArgumentParser

from fisher_lit.errors import UserError
from fisher_lit.problems import ArithmeticProblems, FileProblems, HubProblems, Problem, ProblemSource
from fisher_lit.problems.fields import as_text

MATH = [
    {
        "problem": f"Find $x_{i}$.",
        "solution": "...",
        "answer": f"\\frac{{{i}}}{{7}}",
        "subject": "Algebra",
        "level": i % 5 + 1,
        "unique_id": f"test/algebra/{i}.json",
    }
    for i in range(20)
]
WRAPPED = 'Begin. Write the value in the form Answer: $Answer.\n\n{}\n\nDo not forget "Answer:".'
WRAPPER = r"form Answer: \$Answer\.\n\n(.*)\n\nDo not forget"
CHAT_FIELDS = {
    "question_field": "prompt.0.content",
    "question_pattern": WRAPPER,
    "answer_field": "reward_model.ground_truth",
}


def chat_row(question, answer, index):
    """A row of the shape of DAPO-Math-17k."""
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": WRAPPED.format(question), "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule"},
        "extra_info": {"index": index},
    }


@pytest.fixture
def write(tmp_path):
    """Write rows as JSONL or Parquet, or text as it is; returns the path."""

    def call(rows, name="problems.jsonl"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        if isinstance(rows, str | bytes):
            path.write_bytes(rows.encode() if isinstance(rows, str) else rows)
        elif path.suffix == ".parquet":
            pq.write_table(pa.Table.from_pylist(rows), path)
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return str(path)

    return call


@pytest.fixture(autouse=True)
def no_shared_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


def complaint(source):
    """The message with which loading stops."""
    with pytest.raises(UserError) as stop:
        source.load()
    assert "\n" not in str(stop.value)
    return str(stop.value)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_math_levels(write, suffix):
    path = write(MATH, f"math500.{suffix}")
    assert FileProblems(path).load()[3] == Problem("math500:4", "Find $x_3$.", "\\frac{3}{7}")
    hard = FileProblems(path, filter={"level": [3, 4, 5], "subject": ["Algebra"]}, id_field="unique_id").load()
    assert [p.id for p in hard] == [row["unique_id"] for row in MATH if row["level"] in (3, 4, 5)]


def test_filter_compares_text(write):
    rows = [{"problem": f"q{i}", "answer": "1", "level": level} for i, level in enumerate([3, "3", 3.0, "03", 4, True])]
    kept = FileProblems(write(rows), filter={"level": [3]}).load()
    assert [p.question for p in kept] == ["q0", "q1", "q2"]
    assert FileProblems(write(rows), filter={"level": ["3"]}).load() == kept
    assert [p.question for p in FileProblems(write(rows), filter={"level": [True]}).load()] == ["q5"]


def test_simplerl_zoo_shape(write):
    rows = [
        {
            "prompt": [{"content": f"Question:\nq {i}\nAnswer:\nLet's think step by step.\n", "role": "user"}],
            "reward_model": {"ground_truth": str(i), "style": "rule"},
            "extra_info": {"answer": str(i), "question": f"q {i}", "index": i, "split": "train"},
            "question": f"q {i}",
            "gt_answer": str(i),
            "level": 1 + i % 5,
        }
        for i in range(10)
    ]
    path = write(rows, "train.parquet")
    flat = FileProblems(path, question_field="question", answer_field="gt_answer", filter={"level": [3, 4, 5]}).load()
    assert [(p.question, p.answer) for p in flat] == [(f"q {i}", str(i)) for i in (2, 3, 4, 7, 8, 9)]
    nested = FileProblems(
        path,
        question_field="prompt.-1.content",
        question_pattern=r"Question:\n(.*)\nAnswer:",
        answer_field="extra_info.answer",
        filter={"level": [3, 4, 5]},
    ).load()
    assert nested == flat


def test_dapo_shape(write, caplog):
    """Wrapped questions, repeated many times, without those of another source."""
    questions = [f"What is\n\n${i}$ + {i}?" for i in range(40)]
    rows = [chat_row(q, str(2 * i), f"id-{i}") for _ in range(50) for i, q in enumerate(questions)]
    rows[40 + 7]["reward_model"]["ground_truth"] = "15"
    rows[80 + 7]["reward_model"]["ground_truth"] = "16"
    rows[40 + 3]["reward_model"]["ground_truth"] = "7"
    other = write([{"problem": f"  What is {'$3$'} +\t3? ", "answer": "6"}], "other.jsonl")
    with caplog.at_level(logging.WARNING):
        problems = FileProblems(
            write(rows, "dapo.parquet"), **CHAT_FIELDS, id_field="extra_info.index", exclude=[FileProblems(other)]
        ).load()
    assert problems == [Problem(f"id-{i}", q, str(2 * i)) for i, q in enumerate(questions) if i != 3]
    # Problem 3 is excluded, so its other answer does not count.
    (warning,) = caplog.messages
    assert "2 duplicates have another answer" in warning


def test_questions_are_the_same_up_to_whitespace_and_unicode_form(write):
    rows = [
        {"problem": "caf\u00e9  bill\u00a0?", "answer": "1"},
        {"problem": "\ncafe\u0301 bill\n?", "answer": "1"},
        {"problem": "Caf\u00e9 bill ?", "answer": "1"},
    ]
    path = write(rows)
    assert [p.id for p in FileProblems(path).load()] == ["problems:1", "problems:3"]
    assert FileProblems(path).load()[0].question == "caf\u00e9  bill\u00a0?"
    assert len(FileProblems(path, deduplicate=False).load()) == 3


def test_answer_pattern(write):
    rows = [
        {"question": "a", "answer": "He has 3.\nHe pays 15.\n#### 18"},
        {"question": "b", "answer": "#### 1 first\n####   2,125  \n"},
    ]
    path = write(rows)
    got = FileProblems(path, question_field="question", answer_pattern=r"\A.*####\s*(.+)").load()
    assert [p.answer for p in got] == ["18", "2,125"]
    message = complaint(FileProblems(path, question_field="question", answer_pattern=r"=> (\d+)"))
    assert f"{path}, row 1: field 'answer' does not match its pattern '=> (\\\\d+)'" in message


def test_numbers_become_exact_text(write):
    numbers = [
        "18",
        "-3",
        "18.0",
        "0.5",
        "0.10",
        "1e3",
        "1E-7",
        "3.14159265358979323846",
        "123456789012345678901234567890",
    ]
    texts = [
        "18",
        "-3",
        "18",
        "0.5",
        "0.1",
        "1000",
        "0.0000001",
        "3.14159265358979323846",
        "123456789012345678901234567890",
    ]
    path = write("".join(f'{{"problem": "q{i}", "answer": {n}}}\n\n' for i, n in enumerate(numbers)))
    got = FileProblems(path).load()
    assert [p.answer for p in got] == texts
    # Blank lines count, so that a row is a line of the file.
    assert [p.id for p in got] == [f"problems:{2 * i + 1}" for i in range(len(numbers))]


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_float_text_is_exact(value):
    text = as_text(value)
    assert Fraction(text) == Fraction(repr(value))
    assert set(text) <= set("0123456789.-")
    assert "." not in text or text[-1] not in ".0"


def test_parquet_numbers(write):
    path = write([{"problem": f"q{i}", "answer": x} for i, x in enumerate([18.0, 0.5, -2.25])], "n.parquet")
    assert [p.answer for p in FileProblems(path).load()] == ["18", "0.5", "-2.25"]


def test_unneeded_parquet_columns_are_not_read(write):
    path = write([{"problem": f"q{i}", "answer": "1", "solution": "s" * i} for i in range(100)], "big.parquet")
    metadata = pq.read_metadata(path)
    for c in range(metadata.num_columns):
        chunk = metadata.row_group(0).column(c)
        if chunk.path_in_schema == "solution":
            with open(path, "r+b") as file:
                file.seek(chunk.dictionary_page_offset or chunk.data_page_offset)
                file.write(b"\xff" * chunk.total_compressed_size)
    with pytest.raises(OSError, match="deserialize"):
        pq.read_table(path)
    assert len(FileProblems(path).load()) == 100


def test_parquet_rows_are_numbered_across_batches(write):
    path = write([{"problem": str(i), "answer": "1"} for i in range(70_000)], "long.parquet")
    problems = FileProblems(path).load()
    assert [p.id for p in problems] == [f"long:{i + 1}" for i in range(70_000)]


def test_limit_reads_no_further(write):
    path = write('{"problem": "a", "answer": 1}\n{"problem": "b", "answer": 2}\nnot json\n')
    assert [p.answer for p in FileProblems(path, limit=2).load()] == ["1", "2"]
    assert "row 3: not valid JSON" in complaint(FileProblems(path, limit=3))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"problem": "a"}', "there is no field 'answer'; the row holds problem"),
        ('{"answer": "a"}', "there is no field 'problem'; the row holds answer"),
        ('{"problem": "a", "answer": null}', "field 'answer' is empty"),
        ('{"problem": " \\n", "answer": "1"}', "field 'problem' is empty"),
        ('{"problem": "a", "answer": ["1"]}', "field 'answer' is a list, neither text nor a number"),
        ('{"problem": "a", "answer": 1e999}', "field 'answer' is no usable number (1E+999)"),
        ('{"problem": "a", "answer": NaN}', "not valid JSON (NaN is not a number)"),
        ('{"problem": "a", "answer": 1e99999999999999999999}', "not valid JSON"),
        ('{"problem": "a" "answer": "1"}', "not valid JSON (Expecting ',' delimiter at character 17)"),
        ('["a", "1"]', "a list instead of a JSON object"),
        (b'{"problem": "\xff", "answer": "1"}', "not valid JSON ('utf-8' codec"),
    ],
)
def test_bad_row_is_named(write, line, message):
    line = line.encode() if isinstance(line, str) else line
    path = write(b'{"problem": "first", "answer": "1"}\n' + line + b"\n")
    assert f"{path}, row 2: {message}" in complaint(FileProblems(path))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"question_field": "prompt.1.content"}, "no field 'prompt.1.content'; 'prompt' holds a list of length 1"),
        ({"question_field": "prompt.0.text"}, "there is no field 'prompt.0.text'; '0' holds content, role"),
        ({"question_field": "prompt.0.content.en"}, "'content' holds a value of type str"),
        ({"question_field": "prompt.first"}, "'prompt' holds a list of length 1"),
        ({"question_field": "prompt"}, "field 'prompt' is a list, neither text nor a number"),
        ({"answer_field": "reward_model"}, "field 'reward_model' is a dict, neither text nor a number"),
        ({"filter": {"extra_info.level": [3]}}, "there is no field 'extra_info.level'; 'extra_info' holds index"),
        ({"id_field": "extra_info.id"}, "there is no field 'extra_info.id'; 'extra_info' holds index"),
    ],
)  # fmt: skip
def test_bad_path_is_named(write, fields, message):
    path = write([chat_row("a", "1", "x")])
    text = complaint(FileProblems(path, **{**CHAT_FIELDS, "question_pattern": None, **fields}))
    assert text.startswith(f"{path}, row 1: ")
    assert message in text


def test_incomplete_rows_can_be_left_out(write, caplog):
    rows = [MATH[0], {"problem": "a"}, {"problem": "b", "answer": ""}, {"answer": "c"}, MATH[1]]
    path = write(rows)
    assert "`skip_incomplete: true` leaves such rows out" in complaint(FileProblems(path))
    with caplog.at_level(logging.WARNING):
        problems = FileProblems(path, skip_incomplete=True).load()
    assert [p.id for p in problems] == ["problems:1", "problems:5"]
    assert caplog.messages == [f"{path}: 3 rows without 'problem' or 'answer' are left out"]


def test_missing_column(write):
    path = write(MATH, "math.parquet")
    message = complaint(FileProblems(path, answer_field="gold.value"))
    assert message == f"{path}: there is no column 'gold'; the columns are {', '.join(MATH[0])}"


def test_file_that_is_not_there(tmp_path):
    assert f"no readable file '{tmp_path}/none.jsonl'" in complaint(FileProblems(f"{tmp_path}/none.jsonl"))
    (tmp_path / "folder.jsonl").mkdir()
    assert "no readable file" in complaint(FileProblems(f"{tmp_path}/folder.jsonl"))


def test_home_directory(write, tmp_path, monkeypatch):
    write(MATH, "home.jsonl")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert len(FileProblems("~/home.jsonl").load()) == len(MATH)


def test_file_of_another_kind(write):
    assert "ends neither in .jsonl nor in .parquet" in complaint(FileProblems(write("a,b", "table.csv")))
    path = write("a,b\n1,2\n" * 10, "table.parquet")
    assert f"{path}: not a Parquet file" in complaint(FileProblems(path))


def test_nothing_left_says_why(write):
    path = write([{**row, "problem": "same"} for row in MATH] + MATH[:2])
    source = FileProblems(path, filter={"level": [2, 3], "problem": ["same"]}, exclude=[FileProblems(path, limit=1)])
    # Every level has 4 of the 20 rows; the two more rows have levels 1 and 2.
    assert complaint(source) == (
        f"{path}: no problem is left of 22 rows (8 in `exclude`, 5 with level '1', 4 with level '4', "
        f"4 with level '5', 1 with problem 'Find $x_1$.')"
    )
    assert "no problem is left of 0 rows (the table is empty)" in complaint(FileProblems(write("", "e.jsonl")))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"limit": 0}, "`limit` must be at least 1, got 0"),
        ({"filter": {"level": []}}, "`filter` keeps no value of 'level'"),
        ({"question_pattern": "(a"}, "`question_pattern` '(a' is not a regular expression"),
        ({"answer_pattern": "a+"}, "`answer_pattern` 'a+' has no group"),
    ],
)
def test_bad_settings(write, setting, message):
    assert message in complaint(FileProblems(write(MATH), **setting))


def test_ids_must_be_unique(write):
    message = complaint(FileProblems(write(MATH), id_field="level"))
    assert "4 problems have the id '1' in `id_field` 'level'" in message


def test_hub_reads_a_local_data_set_like_the_file(write, tmp_path):
    rows = [chat_row(f"q {i % 30}", str(i % 30), f"id-{i % 30}") for i in range(3000)]
    path = write(rows, "dapo/train.parquet")
    write(MATH, "dapo/test.parquet")
    hub = HubProblems(str(tmp_path / "dapo"), data_files="train.parquet", **CHAT_FIELDS).load()
    file = FileProblems(path, **CHAT_FIELDS).load()
    assert len(hub) == 30
    assert [(p.question, p.answer) for p in hub] == [(p.question, p.answer) for p in file]
    assert hub[4].id == "dapo:5"


def test_hub_splits(write, tmp_path):
    write(MATH, "set/train.jsonl")
    write(MATH[:7], "set/test.jsonl")
    name = str(tmp_path / "set")
    assert len(HubProblems(name, split="test", filter={"level": [3, 4, 5]}).load()) == 3
    assert "cannot be loaded: Unknown split" in complaint(HubProblems(name, split="dev"))
    assert "BuilderConfig 'hard' not found" in complaint(HubProblems(name, subset="hard"))
    assert "(test): there is no column 'gold'" in complaint(HubProblems(name, split="test", answer_field="gold"))


def test_hub_data_set_that_is_not_there(write, tmp_path):
    message = complaint(HubProblems(str(tmp_path / "none")))
    assert message.startswith(f"problems: {tmp_path}/none (train) cannot be loaded: Couldn't find")
    write('{"problem": "a"}\n{"problem', "broken/train.jsonl")
    assert "cannot be loaded: JSON parse error" in complaint(HubProblems(str(tmp_path / "broken")))


def test_sources_from_yaml(write, tmp_path):
    path, other = write(MATH), write(MATH[:4], "other.jsonl")
    config = write(
        f"""
source:
  class_path: fisher_lit.problems.FileProblems
  init_args:
    path: {path}
    filter: {{level: [3, "4", 5.0]}}
    exclude:
      - class_path: fisher_lit.problems.FileProblems
        init_args: {{path: {other}}}
      - class_path: fisher_lit.problems.ArithmeticProblems
        init_args: {{num_problems: 3, operations: "+-*"}}
""",
        "config.yaml",
    )
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--config", action="config")
    parser.add_argument("--source", type=ProblemSource | None)
    source = parser.instantiate(parser.parse_args(["--config", config, "--source.limit", "2"])).source
    wanted = [row["problem"] for row in MATH[4:] if row["level"] >= 3][:2]
    assert [p.question for p in source.load()] == wanted


def arithmetic(*args, **kwargs):
    return ArithmeticProblems(*args, **kwargs).load()


@pytest.mark.parametrize(
    "settings",
    [
        {"operations": "+"},
        {"operations": "-*", "num_terms": 3, "max_operand": 9},
        {"operations": "+-*", "num_terms": 6, "min_operand": 10, "max_operand": 999},
        # More expressions than 64 bits can count.
        {"operations": "*-+", "num_terms": 12, "max_operand": 10**9},
    ],
)
def test_arithmetic_answers_are_exact(settings):
    problems = arithmetic(300, **settings)
    assert len({p.question for p in problems}) == len({p.id for p in problems}) == 300
    for problem in problems:
        assert problem.answer == str(eval(problem.question))
        operands = [int(t) for t in problem.question.replace("-", "+").replace("*", "+").split("+")]
        assert len(operands) == settings.get("num_terms", 2)
        assert min(operands) >= settings.get("min_operand", 0)
        assert max(operands) <= settings.get("max_operand", 99)
        assert set(problem.question) - set("0123456789") <= set(settings["operations"])


def test_arithmetic_can_give_every_expression_once():
    digits, operations = range(2, 5), "+*"
    every = {
        f"{a}{p}{b}{q}{c}"
        for a, b, c in itertools.product(digits, repeat=3)
        for p, q in itertools.product(operations, repeat=2)
    }
    settings = {"operations": operations, "num_terms": 3, "min_operand": 2, "max_operand": 4}
    problems = arithmetic(len(every), **settings)
    assert sorted(p.question for p in problems) == sorted(every)
    message = complaint(ArithmeticProblems(len(every) + 1, **settings))
    assert f"`num_problems` is {len(every) + 1}" in message
    assert f"only {len(every)} problems" in message


def test_arithmetic_order_is_uniform():
    """Six orders of three expressions: each frequency over 3000 seeds within five standard deviations."""
    orders = Counter(
        tuple(p.question for p in arithmetic(3, seed=seed, operations="+-*", min_operand=7, max_operand=7))
        for seed in range(3000)
    )
    assert len(orders) == 6
    assert max(abs(count - 500) for count in orders.values()) < 5 * math.sqrt(3000 * (1 / 6) * (5 / 6))


def test_arithmetic_is_the_same_everywhere():
    """Fixed once; another Python or platform must give the same."""
    assert [p.question for p in arithmetic(4, seed=0)] == ["11+63", "91+68", "65+6", "45+42"]
    mixed = arithmetic(3, seed=5, operations="+-*", num_terms=3)
    assert [p.question for p in mixed] == ["56-85-47", "28*50*66", "95*41*98"]
    assert arithmetic(10, seed=3)[:4] == arithmetic(4, seed=3)
    assert arithmetic(10, seed=3) != arithmetic(10, seed=4)


def test_arithmetic_exclusion(write):
    held_out = ArithmeticProblems(300, seed=1, max_operand=19)
    rest = ArithmeticProblems(100, seed=0, max_operand=19, exclude=[held_out])
    every = {f"{a}+{b}" for a in range(20) for b in range(20)}
    assert {p.question for p in rest.load()} == every - {p.question for p in held_out.load()}
    message = complaint(ArithmeticProblems(101, max_operand=19, exclude=[held_out]))
    assert "only 400 problems, 300 of them in `exclude`" in message
    path = write([{"problem": " 1+2\n", "answer": "3"}])
    questions = {p.question for p in arithmetic(9, min_operand=1, max_operand=3, num_terms=2)}
    left = {p.question for p in arithmetic(8, min_operand=1, max_operand=3, exclude=[FileProblems(path)])}
    assert left == questions - {"1+2"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_problems": 0}, "`num_problems` must be at least 1, got 0"),
        ({"operations": ""}, "`operations` must be different characters of '+-*', got ''"),
        ({"operations": "+/"}, "got '+/'"),
        ({"operations": "++"}, "got '++'"),
        ({"num_terms": 1}, "`num_terms` must be at least 2, got 1"),
        ({"min_operand": -1}, "operands go from -1 to 99"),
        ({"min_operand": 5, "max_operand": 4}, "operands go from 5 to 4"),
    ],
)
def test_arithmetic_bad_settings(settings, message):
    assert message in complaint(ArithmeticProblems(**{"num_problems": 3, **settings}))
