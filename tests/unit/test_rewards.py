r"""Rewards: extraction, judgement, and workers that hang, die and outlive nothing. One row of a table is one answer."""

import copy
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path

import pytest
import torch

from fisher_lit.errors import UserError
from fisher_lit.rewards import MathReward, score
from fisher_lit.rewards.extract import final_answer
from fisher_lit.rewards.judge import is_correct
from fisher_lit.rewards.normalize import normalize, plain_number
from fisher_lit.rewards.quantities import split_unit

torch.set_num_threads(1)

HANG = r"\boxed{8^{9^{9^{9}}}}"
SLOW = r"\boxed{\frac{2a}{4}}"
SLOW_GOLD = r"0.5a"


# --- extraction ---


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"First \boxed{3}, no: \boxed{4}.", "4"),
        (r"\boxed{\frac{1}{\sqrt{2}}} for {every} case", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{x = \boxed{7}}", "7"),
        (r"\fbox{12}", "12"),
        (r"so \boxed3.", "3"),
        ("$$\\boxed{\n 9 \n}$$", "9"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{1} and $\boxed{2}$", "1 , 2"),
        (r"\boxed{6}, that is \boxed{\frac{12}{2}}", r"\frac{12}{2}"),
        (r"Put it in \boxed{}. I get \boxed{8}", "8"),
        (r"\boxed{8}. (I was asked to use \boxed{\text{your answer}}.)", "8"),
        (r"<think>\boxed{1}</think> \boxed{2}", "2"),
        (r"maybe \boxed{1}</think> Answer: 2", "2"),
        (r"Answer: 2 <think> or \boxed{1}", "2"),
        ("The answer is 5. No, the answer is 6.", "6"),
        ("The answer to the second part is therefore $\\frac{3}{4}$.", r"\frac{3}{4}"),
        ("**Final Answer:** **17**", "17"),
        ("### Final Answer\n\n$$\n17\n$$", "17"),
        ("Answer: (C) because it fits", "(C)"),
        ("The answer is 3.25.", "3.25"),
        ("She sells 9.\n#### 1,018\n", "1,018"),
        ("答案是 23。", "23"),
        (" 46 ", "46"),
        ("-3/4", "-3/4"),
        ("1,234.5", "1,234.5"),
    ],
)
def test_the_final_answer_is_found(response: str, answer: str) -> None:
    assert final_answer(response) == answer


@pytest.mark.parametrize(
    "response",
    [
        "",
        " \n ",
        "I do not know.",
        "x is 42, hence \\boxed{}",
        r"\boxed{\ldots} 42",
        r"\boxed{42",
        r"The answer is \boxed{42",
        r"<think>\boxed{42}",
        r"\boxed{42}</think>",
        "The answer is not 42.",
        "The final answer within the box might be near 42",
        "46+20=66",
        "about 42",
    ],
)
def test_no_answer_is_found_where_none_is_committed_to(response: str) -> None:
    assert final_answer(response) is None


def test_degenerate_responses_take_no_time() -> None:
    """Repetition is what an untrained policy writes, in the training process: none may cost a quadratic search."""
    start = time.perf_counter()
    for unit in (
        r"\boxed{",
        r"\boxed{}",
        "{",
        "$",
        r"\$",
        "\n",
        " ",
        "#",
        "answer ",
        "The answer is ",
        "answer:",
        "**",
    ):
        text = unit * (40_000 // len(unit))
        final_answer(text)
        final_answer("The answer is " + text)
    assert time.perf_counter() - start < 5


# --- judgement ---

RIGHT = {
    "integers": [("1,250,000", "1250000"), ("10{,}000", "10000"), (r"10\,000", "10000"), ("007", "7"), ("+4", "4")],
    "unicode": [
        ("−8", "-8"),
        ("４２", "42"),
        ("x²", "x^2"),
        ("3√5", r"3\sqrt{5}"),
        ("2½", r"\frac{5}{2}"),
        ("60°", "60"),
    ],
    "decimals": [("0.750", r"\frac{3}{4}"), (".2", "1/5"), (r"2.5\times 10^{-4}", "0.00025"), ("3e4", "30000")],
    "repeating": [(r"0.\overline{36}", r"\frac{4}{11}"), (r"0.1666\ldots", "1/6"), (r"0.2\bar{7}", r"\frac{5}{18}")],
    "fractions": [(r"\frac68", r"\frac{3}{4}"), (r"\dfrac{-2}{3}", r"-\frac{2}{3}"), (r"\frac{\frac12}{2}", "0.25")],
    "mixed": [("3 1/4", r"\frac{13}{4}"), (r"3\frac{1}{4}", "3.25"), (r"-3\frac14", r"-\frac{13}{4}")],
    "surds": [(r"\sqrt{72}", r"6\sqrt2"), (r"\frac{1}{\sqrt3}", r"\frac{\sqrt{3}}{3}"), ("sqrt(8)/2", r"\sqrt 2")],
    "closed forms": [(r"\log_3 81", "4"), ("5!", "120"), (r"\binom{6}{2}", "15"), (r"\cos 60^\circ", r"\frac12")],
    "bare LaTeX": [("9/7", r"\dfrac97"), (r"\frac{7}{4}", "$1.75$"), ("5", r"\boxed{5}"), ("7,250", "so\n#### 7,250")],
    "words": [
        ("eleven", "11"),
        (r"\text{Thirty-two}", "32"),
        ("North", r"\text{north}"),
        ("an hyperbola", "hyperbola"),
    ],
    "percent": [
        ("35", r"35\%"),
        ("0.35", r"35\%"),
        (r"\frac{7}{20}", r"35\%"),
        (r"35\%", "0.35"),
        ("35 percent", r"35\%"),
    ],
    "degrees": [
        ("60", r"60^\circ"),
        (r"60^\circ", r"\frac{\pi}{3}"),
        (r"\frac{\pi}{3}", r"60^\circ"),
        ("60 degrees", "60"),
    ],
    "units": [
        (r"8\text{ kg}", "8"),
        ("8", r"8\text{ kg}"),
        ("8 kg", r"8000\text{ g}"),
        (r"72\text{ km/h}", r"20\text{ m/s}"),
        (r"9\text{ square feet}", r"9\,\mathrm{ft}^2"),
        (r"\$4.50", r"450 \text{ cents}"),
        (r"\$4.50", "4.5"),
        ("6 books", "6"),
        ("3 m", "3"),
        (r"2\pi\text{ cm}", r"2\pi"),
    ],
    "clock": [(r"7:05\text{ AM}", "7:05"), ("07:05 a.m.", "7:05 AM")],
    "ratios": [("6:9", "2:3"), ("2:3", r"\frac23"), ("1:2:4", "2:4:8")],
    "lists": [
        ("3,1,2", "1, 2, 3"),
        (r"4 \text{ and } 1", "1,4"),
        (r"2\pm\sqrt3", r"2-\sqrt3, 2+\sqrt3"),
        ("5; 6", "6,5"),
    ],
    "sets": [(r"\{2,1\}", "1,2"), (r"\{1,2,2\}", r"\{1,2\}"), (r"\{7\}", "7"), (r"\pm 3", r"\{-3, 3\}")],
    "tuples": [(r"\left(\frac12, -4\right)", "(0.5,-4)"), (r"\langle 1, 2, 3\rangle", "(1,2,3)"), ("1, 2", "(1,2)")],
    "intervals": [
        (r"-1 < x \le 4", "(-1,4]"),
        (r"x \ge \sqrt{8}", r"[2\sqrt2,\infty)"),
        (r"x\in[1,3]", "[1,3]"),
        (r"(4,6)\cup(0,1]", r"(0,1]\cup(4,6)"),
        (r"x \ne 5", r"(-\infty,5)\cup(5,\infty)"),
        (r"\mathbb{R}\setminus\{5\}", r"x\neq5"),
        (r"x < 1 \text{ or } x > 2", r"(-\infty,1)\cup(2,\infty)"),
        (r"\text{all real numbers}", r"(-\infty,\infty)"),
        (r"\varnothing", r"\text{no solution}"),
        ("4>y", "y<4"),
        ("2x+2y<2", "1>x+y"),
    ],
    "assignments": [
        ("x = 9", "9"),
        ("9", "x = 9"),
        (r"a_n = 3^n", "3^n"),
        ("f(x) = 1+x", "f(x)=x+1"),
        (r"\text{Area} = 12", "12"),
        ("m+n = 12", "12"),
        ("7+5 = 12", "12"),
        ("b=2, a=1", "a=1, b=2"),
        ("x=1, y=2", "(1,2)"),
        ("y=2, x=1", "(1,2)"),
        ("(x,y) = (1,2)", "(1,2)"),
        (r"x=1 \text{ or } x=-6", "-6, 1"),
        (r"\sqrt{2} \approx 1.41", r"\sqrt2"),
    ],
    "equations": [("3x - y = 4", "y = 3x - 4"), ("x^2+y^2=9", "9 - y^2 = x^2"), ("2y=6x-8", "y = 3x - 4")],
    "algebra": [
        ("x^2-4", "(x-2)(x+2)"),
        (r"2\sin t\cos t", r"\sin 2t"),
        (r"\frac{1}{\sqrt{k}}", r"\sqrt{1/k}"),
        ("(2-i)^2", "3-4i"),
        (r"e^{i\pi}", "-1"),
        (r"\sqrt{x^2}", "|x|"),
        (r"\frac{n^2+n}{2}", r"\sum_{k=1}^{n} k"),
    ],
    "matrices": [
        (r"\begin{bmatrix}1&2\\0&\frac12\end{bmatrix}", r"\begin{pmatrix}1 & 2 \\ 0 & 0.5\end{pmatrix}"),
        (r"(3,-1)", r"\begin{pmatrix}3\\-1\end{pmatrix}"),
    ],
    "choices": [("d", "D"), (r"\text{(D)}", "D"), ("D. 31", "D"), (r"\textbf{(D)}\ 31", "31"), ("D", r"\text{(D)}")],
    "bases": [("201_3", "19"), ("19_{10}", "201_3")],
    "residues": [(r"n\equiv 12 \pmod{5}", r"n \equiv 2 \pmod 5")],
    "layout": [("((4))", "4"), (r"\displaystyle 4\,", "4"), ("**4**", "4"), (r"\frac12\,.", "0.5")],
}

WRONG = {
    "integers": [
        ("12", "12,500"),
        ("40000000001", "40000000003"),
        ("10^{50}+1", "10^{50}"),
        ("2^{2^{18}}+1", "2^{2^{18}}"),
    ],
    "sign": [("−8", "8"), (r"-\frac12", r"\frac12"), (r"\infty", r"-\infty"), ("-2 1/2", "-1.5")],
    "rounding": [
        ("0.333", r"\frac13"),
        ("3.14159265358979", r"\pi"),
        ("1.41421356", r"\sqrt2"),
        ("1000000.2", "1000000.3"),
        ("3 \\times 10^{-12}", "3 \\times 10^{-13}"),
        (r"\frac{1}{3^{60}}", r"\frac{1}{3^{61}}"),
        ("10^{-40}", "0"),
        (r"10^{90}+\sqrt2", r"10^{90}+\sqrt3"),
        (r"(10^{-9}, 1)", "(10^{-8}, 1)"),
    ],
    "mixed": [("3 1/4", r"\frac14"), ("5 11/2", "11")],
    "percent": [(r"35\%", "35"), ("3.5", r"35\%")],
    "degrees": [("60", r"\frac{\pi}{3}"), (r"60^\circ", r"\frac{\pi}{6}")],
    "units": [
        ("5 m", "5 cm"),
        (r"5\text{ m}", r"5\text{ cm}"),
        (r"5\text{ cm}", r"5\text{ cm}^2"),
        (r"5\text{ pens}", r"5\text{ cups}"),
        ("5c", "5"),
        ("5", "5c"),
        ("5c", "5s"),
        (r"\$5", r"5\text{ cents}"),
        (r"5\text{ (or 6)}", "5"),
    ],
    "clock": [("2:30 PM", "2:30 AM"), ("1:20 PM", "2:40 PM"), ("1:20", "2:40")],
    "ratios": [("3:2", "2:3"), ("1:2:3", "1:2:4")],
    "hedges": [(r"3 \text{ or } 8", "3"), ("3, 8", "8"), (r"3 \approx 8", "8"), ("x = 3, x = 8", "3"), ("3 = 8", "8")],
    "incomplete": [("3", "3, 8"), ("x=3", r"x=1 \text{ or } x=3"), ("3", r"\pm 3"), (r"\pm 3", "3")],
    "tuples": [("(6,5)", "(5,6)"), ("2,1", "(1,2)"), (r"\{1,2\}", "(1,2)"), ("y=1, x=2", "(1,2)")],
    "intervals": [
        ("[1,2)", "[1,2]"),
        ("(1,2)", "[1,2]"),
        (r"x \le 2", "x<2"),
        ("x>2", "x<2"),
        (r"(-\infty,\infty)", r"(-\infty,1)\cup(1,\infty)"),
        ("x>2", "t>2"),
        ("x>5", "5"),
        ("x+y<1", "x+y>1"),
    ],
    "assignments": [("x=5", "y=5"), ("a=1, b=2", "a=2, b=1"), ("x^2=4", "x=2"), ("46+20=67", "66")],
    "equations": [("y = 3x + 4", "y = 3x - 4"), ("2x+y+1=0", "x-3y+2=0")],
    "algebra": [
        ("r^2", "R^2"),
        ("R-r", "0"),
        ("s^2+1", "x^2+1"),
        ("(a+b)^2", "a^2+b^2"),
        (r"\sqrt{y^4}", "y"),
        ("2-i", "2+i"),
        ("f'(x)", "f(x)"),
        (r"\frac{0}{0}", "0"),
    ],
    "matrices": [(r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&3\\2&4\end{pmatrix}")],
    "choices": [("C", "D"), ("C. 31", "D"), (r"\textbf{(D)}\ 31", "32"), ("31", "D")],
    "words": [("south", "north"), ("Lea", "Ale"), ("ivan", "navi"), (r"\text{False}", "true"), ("eleven", "12")],
    "bases": [("201_4", "201_3"), ("201", "201_3")],
    "residues": [(r"n\equiv 3 \pmod{5}", r"n\equiv 2 \pmod 5"), (r"n\equiv 2 \pmod{10}", r"n\equiv 2 \pmod 5")],
    "malformed": [
        (r"\frac14 r\{", r"\frac14"),
        (r"^3\frac{1}{3}^", r"\frac13"),
        ("2 3", "5"),
        ("1.2.3", "1.2"),
        ("", "0"),
        (r"\frac{", "1"),
        ("n. 9 \\pmod 7", "n\\equiv 9 \\pmod 7"),
    ],
}


def rows(table: dict[str, list[tuple[str, str]]]) -> list:
    return [pytest.param(a, g, id=f"{kind}-{i}") for kind, pairs in table.items() for i, (a, g) in enumerate(pairs)]


@pytest.mark.parametrize(("answer", "gold"), rows(RIGHT))
def test_right_answers(answer: str, gold: str) -> None:
    assert is_correct(answer, gold)


@pytest.mark.parametrize(("answer", "gold"), rows(WRONG))
def test_wrong_answers(answer: str, gold: str) -> None:
    assert not is_correct(answer, gold)


@pytest.mark.parametrize(
    "text",
    sorted({text for table in (RIGHT, WRONG) for ps in table.values() for p in ps for text in p if "####" not in text}),
)
def test_an_answer_equals_itself_and_its_spelling_is_stable(text: str) -> None:
    once = normalize(text)
    assert normalize(once) == once
    assert is_correct(text, text) == bool(once)


@pytest.mark.parametrize("number", ["17", "-0.125", "6/8", r"-\frac{22}{7}", ".5", "123456789012345678901234567890.5"])
def test_plain_numbers_are_exact(number: str) -> None:
    python = number.replace(r"\frac{22}{7}", "22/7")
    assert plain_number(normalize(number)) == Fraction(python)


def test_numbers_beyond_the_digit_limit_of_python() -> None:
    digits = "3" * 6000
    assert score([rf"\boxed{{{digits}}}"] * 2, [digits, digits[:-1] + "4"]) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("text", "other", "ratio"),
    [("1 mile", "1 foot", 5280), ("1 square yard", "1 square foot", 9), ("1 day", "1 minute", 1440)],
)
def test_unit_sizes(text: str, other: str, ratio: int) -> None:
    (_, unit), (_, small) = split_unit(text), split_unit(other)
    assert unit is not None
    assert small is not None
    assert unit.powers == small.powers
    assert unit.scale / small.scale == ratio


def test_judging_needs_no_main_thread() -> None:
    verdicts: list[bool] = []
    thread = threading.Thread(target=lambda: verdicts.append(is_correct(r"\frac{x}{2}", "0.5x")))
    thread.start()
    thread.join()
    assert verdicts == [True]


# --- workers ---


@pytest.fixture(scope="module")
def reward() -> Iterator[MathReward]:
    reward = MathReward(num_workers=2, timeout_s=2.0)
    yield reward
    reward.close()


def worker_pids() -> set[int]:
    return {process.pid for process in multiprocessing.active_children() if process.pid is not None}


def wait_until(condition: Callable[[], bool], seconds: float = 15.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def alive(pid: int) -> bool:
    """Whether the process runs: a zombie, which nobody of ours can reap, does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_order_is_kept_and_kinds_mix(reward: MathReward) -> None:
    responses = [r"\boxed{2x}", "no idea", "46", r"\boxed{x+x}", r"\boxed{3}", r"\boxed{x^2}", r"\boxed{x+x}"]
    golds = ["x+x", "5", "46", "2x", "4", "2x", "x^2"]
    assert reward(responses, golds) == [1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    assert reward([], []) == []


def test_easy_answers_start_no_worker() -> None:
    before = worker_pids()
    assert MathReward()(["nothing", r"\boxed{0.50}", r"\boxed{\text{east}}"], ["1", r"\frac12", r"\text{east}"]) == [
        0.0,
        1.0,
        1.0,
    ]
    assert worker_pids() == before


def test_hanging_answers_are_cut_off_and_the_pool_survives(reward: MathReward) -> None:
    before, start = reward.num_timeouts, time.monotonic()
    responses = [HANG, SLOW, HANG.replace("8", "7"), r"\boxed{a^2}", r"\boxed{5}"]
    assert reward(responses, ["4", SLOW_GOLD, "4", "a a", "5"]) == [0.0, 1.0, 0.0, 1.0, 1.0]
    assert reward.num_timeouts == before + 2
    # Two workers hang for two seconds each; the rest is the start of their successors.
    assert 2.0 <= time.monotonic() - start < 20
    assert reward([SLOW, r"\boxed{a+1}"], [SLOW_GOLD, "1+a"]) == [1.0, 1.0]
    assert reward.num_timeouts == before + 2


def test_a_worker_killed_in_mid_task_scores_zero() -> None:
    reward = MathReward(num_workers=1, timeout_s=60.0)
    before = worker_pids()
    assert reward([SLOW], [SLOW_GOLD]) == [1.0]
    (worker,) = worker_pids() - before
    scores: list[float] = []
    thread = threading.Thread(target=lambda: scores.extend(reward([HANG], ["4"])))
    thread.start()
    busy = Path(f"/proc/{worker}/stat")
    ticks = int(busy.read_text().split()[13])
    wait_until(lambda: int(busy.read_text().split()[13]) > ticks + 20)
    os.kill(worker, signal.SIGKILL)
    thread.join(timeout=30)
    assert scores == [0.0]
    assert reward.num_timeouts == 1
    assert reward([SLOW], [SLOW_GOLD]) == [1.0]
    # An idle worker that dies takes no answer with it.
    (worker,) = worker_pids() - before
    os.kill(worker, signal.SIGKILL)
    assert reward([r"\boxed{b+b}"], ["2b"]) == [1.0]
    assert reward.num_timeouts == 1
    reward.close()
    wait_until(lambda: worker_pids() == before)


def test_workers_are_light_and_bounded(reward: MathReward) -> None:
    """torch is loaded here, and not there; an answer cannot take the machine's memory."""
    pool = reward._running_pool()
    modules = pool.schedule(eval, args=("sorted(__import__('sys').modules)",)).result()
    assert "math_verify" in modules
    assert not {"torch", "lightning", "transformers", "pytest"} & set(modules)
    assert isinstance(pool.schedule(bytearray, args=(2**33,)).exception(), MemoryError)
    assert reward([SLOW], [SLOW_GOLD]) == [1.0]


def test_calls_from_threads_set_no_signal(reward: MathReward, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list = []
    monkeypatch.setattr(signal, "signal", lambda *args: calls.append(args))
    monkeypatch.setattr(signal, "alarm", lambda *args: calls.append(args))
    scores: dict[int, list[float]] = {}

    def work(k: int) -> None:
        scores[k] = reward([rf"\boxed{{{k}y+y}}", rf"\boxed{{{k}y}}"], [f"{k + 1}y"] * 2)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(2, 6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert scores == {k: [1.0, 0.0] for k in range(2, 6)}
    assert calls == []


def test_copies_start_workers_of_their_own(reward: MathReward) -> None:
    reward([SLOW], [SLOW_GOLD])
    for twin in (copy.deepcopy(reward), pickle.loads(pickle.dumps(reward))):
        assert (twin.num_workers, twin.timeout_s, twin.num_timeouts) == (2, 2.0, reward.num_timeouts)
        assert twin([r"\boxed{5}"], ["5"]) == [1.0]
        twin.close()
    assert reward([SLOW], [SLOW_GOLD]) == [1.0]


SCRIPT = """
import os, multiprocessing, signal, sys, threading, time
print("script", flush=True)
from fisher_lit.rewards import MathReward, score
reward = MathReward(num_workers=2, timeout_s=2.0)
print(reward([r"\\boxed{x+x}"], ["2x"]), score([r"\\boxed{y+y}"], ["3y"], num_workers=1), flush=True)
print(*(p.pid for p in multiprocessing.active_children()), flush=True)
if sys.argv[1] == "killed":
    threading.Thread(target=reward, args=([r"\\boxed{8^{9^{9^{9}}}}"], ["4"])).start()
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("how", ["file", "command", "killed"])
def test_scripts_without_a_guard_run_once_and_leave_no_process(how: str, tmp_path: Path) -> None:
    """The workers do not import the script, and end with it, however it ends and whatever they are at."""
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    command = [sys.executable, str(path), how] if how != "command" else [sys.executable, "-c", SCRIPT, how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    lines = done.stdout.splitlines()
    assert lines[:2] == ["script", "[1.0] [0.0]"]
    assert done.returncode == (-signal.SIGKILL if how == "killed" else 0)
    if how != "killed":
        assert done.stderr == ""
    pids = [int(pid) for pid in lines[2].split()]
    assert len(pids) == 3
    wait_until(lambda: not any(map(alive, pids)))


# --- arguments ---


def test_bad_arguments_are_named() -> None:
    with pytest.raises(UserError, match="`num_workers` must be at least 1, got 0"):
        MathReward(num_workers=0)
    for timeout in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(UserError, match="`timeout_s`"):
            MathReward(timeout_s=timeout)
    with pytest.raises(UserError, match="2 `responses` for 1 `golds`"):
        score(["1", "2"], ["1"])
