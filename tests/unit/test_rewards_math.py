"""Mathematical answers: found in replies, judged in processes that can be killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollouts.engine.errors import EvaluationFailed
from rollouts.rewards.boxed import final_answer, unwrap
from rollouts.rewards.isolated import MAX_EXPRESSION_CHARS, MathVerifier

DATA = Path(__file__).parent.parent / "data"
PROBLEMS = [json.loads(line) for line in (DATA / "math.jsonl").read_text().splitlines()]
JUDGED = [json.loads(line) for line in (DATA / "math_judged.jsonl").read_text().splitlines()]

HANGS = "(" * 300 + "32" + ")" * 300  # the LaTeX grammar backtracks for hours
HANGS_IN_ONE_INSTRUCTION = "9^{9^{9}} \\cdot 1.5"


@pytest.fixture(scope="module")
def verifier() -> Iterator[MathVerifier]:
    # What is judged is tested here, not how fast: some of the real answers take seconds, and a busy machine is slow.
    verifier = MathVerifier(timeout=300.0)
    yield verifier
    verifier.close()


@pytest.fixture
def hasty() -> Iterator[MathVerifier]:
    verifier = MathVerifier(processes=1, timeout=1.0)
    yield verifier
    verifier.close()


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("So it is \\boxed{42}.", "42"),
        ("\\boxed{1}, or rather \\boxed{ 2 }", "2"),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{\\left\\{1, 2\\right\\}}", "\\left\\{1, 2\\right\\}"),
        ("\\boxed{5} but then \\boxed{\\frac{1}{", "5"),
        ("\\boxed{\\boxed{7}}", "7"),
        ("\\boxed{}", ""),
        ("42", None),
        ("\\boxed{42", None),
        ("\\boxed 42", None),
        ("", None),
    ],
)
def test_the_final_answer_is_in_the_last_complete_box(reply: str, answer: str | None) -> None:
    assert final_answer(reply) == answer


@given(st.text(alphabet="\\boxed{}a ", max_size=60))
def test_finding_the_final_answer_never_fails(reply: str) -> None:
    answer = final_answer(reply)
    assert answer is None or answer in reply


@pytest.mark.parametrize("reply", ["\\boxed{" * 150_000, "{" * 1_000_000, "\\boxed{" + "{}" * 500_000 + "}"], ids=len)
def test_a_megabyte_is_searched_in_linear_time(reply: str) -> None:
    started = time.perf_counter()
    final_answer(reply)
    assert time.perf_counter() - started < 3


@pytest.mark.parametrize(
    ("answer", "bare"),
    [
        ("$10 \\pi$", "10 \\pi"),
        ("\\(\\sqrt{2}\\)", "\\sqrt{2}"),
        ("$$x$$", "x"),
        ("\\[x\\]", "x"),
        ("32.", "32"),
        ("$1$ and $2$", "$1$ and $2$"),
        ("$", "$"),
        ("", ""),
    ],
)
def test_delimiters_are_taken_off(answer: str, bare: str) -> None:
    assert unwrap(answer) == bare


async def test_every_real_gold_answer_is_judged_equal_to_itself(verifier: MathVerifier) -> None:
    for problem in PROBLEMS:
        gold = problem["expected_answer"]
        verifier.check_gold(gold)
        spaced = f"  {unwrap(gold)} "  # not the same text, so that it must be parsed
        assert (await verifier.verify(gold, f"0 + {spaced}" if "," not in gold else spaced))["correct"], problem["id"]


async def test_real_replies_are_judged_as_a_reference_judged_them(verifier: MathVerifier) -> None:
    for case in JUDGED:
        answer = final_answer(case["reply"])
        assert answer is not None
        verdict = await verifier.verify(case["expected_answer"], answer)
        assert verdict["correct"] == bool(case["library_reward"]), case["reply"]


@pytest.mark.parametrize(
    ("gold", "answer", "correct"),
    [
        ("32", "\\frac{64}{2}", True),
        ("32", "x = 32", True),
        ("0.75", "\\frac34", True),
        ("$\\frac{1}{2}, \\frac{\\sqrt{7}}{7}$", "\\frac{1}{\\sqrt{7}}, 0.5", True),
        ("32", "33", False),
        ("32", "31, 32", False),  # a list of guesses
        ("32", "31 \\text{ or } 32", False),
        ("32", "not 32", False),
        ("32", "1 \\le x \\le 32", False),
        ("32", "", False),
        ("32", "}{", False),
        ("32", "\\frac{1}{0}", False),
        ("32", "2^{100000}", False),
    ],
)
async def test_equivalence(verifier: MathVerifier, gold: str, answer: str, correct: bool) -> None:
    assert (await verifier.verify(gold, answer))["correct"] is correct


async def test_a_huge_answer_is_wrong_at_once(verifier: MathVerifier) -> None:
    started = time.perf_counter()
    verdict = await verifier.verify("32", "1+" * 500_000)
    assert not verdict["correct"]
    assert time.perf_counter() - started < 0.5


@pytest.mark.parametrize("answer", [HANGS, HANGS_IN_ONE_INSTRUCTION], ids=["grammar", "integer"])
async def test_an_answer_that_cannot_be_judged_in_time_is_not_wrong(hasty: MathVerifier, answer: str) -> None:
    with pytest.raises(EvaluationFailed) as raised:
        await hasty.verify("32", answer)
    assert raised.value.retryable
    assert (await hasty.verify("32", "32"))["correct"]  # a new process took over


async def test_a_killed_process_is_an_infrastructure_failure_and_is_replaced() -> None:
    verifier = MathVerifier(processes=1)
    before = psutil.Process().children()
    await verifier.verify("1", "1")
    [child] = [child for child in psutil.Process().children() if child not in before]
    idle = child.cpu_times().user
    pending = asyncio.create_task(verifier.verify("32", HANGS))
    # A process killed before it took the comparison would just be replaced: wait until it is busy with it.
    while child.cpu_times().user < idle + 0.1:
        await asyncio.sleep(0.01)
    child.kill()
    with pytest.raises(EvaluationFailed, match=r"signal 9|failed") as raised:
        await pending
    assert raised.value.retryable
    assert (await verifier.verify("1", "1"))["correct"]
    verifier.close()


async def test_comparisons_run_side_by_side(verifier: MathVerifier) -> None:
    verdicts = await asyncio.gather(*(verifier.verify(str(n % 3), "1") for n in range(30)))
    assert [v["correct"] for v in verdicts] == [n % 3 == 1 for n in range(30)]


@pytest.mark.parametrize("gold", ["", "}", "1" * (MAX_EXPRESSION_CHARS + 1)])
def test_a_gold_answer_that_nothing_can_equal_is_refused(verifier: MathVerifier, gold: str) -> None:
    with pytest.raises(ValueError, match=r"not a mathematical expression|longer than"):
        verifier.check_gold(gold)


def test_closing_leaves_no_process() -> None:
    before = psutil.Process().children()
    verifier = MathVerifier()
    verifier.check_gold("1")
    children = [child for child in psutil.Process().children() if child not in before]
    verifier.close()
    assert children and not any(child.is_running() for child in children)


def test_a_long_comparison_does_not_hold_up_the_exit() -> None:
    program = (
        "import asyncio\n"
        "from rollouts.rewards.isolated import shared_verifier\n"
        "async def main():\n"
        "    shared_verifier().check_gold('1')\n"
        f"    task = asyncio.create_task(shared_verifier().verify('32', {HANGS!r}))\n"
        "    await asyncio.sleep(0.2)\n"
        "    task.cancel()\n"
        "    print('leaving', flush=True)\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == b"leaving\n"
        assert parent.wait(timeout=5) == 0


async def test_closing_ends_comparisons_under_way() -> None:
    verifier = MathVerifier(processes=1)
    pending = [asyncio.create_task(verifier.verify("32", HANGS)) for _ in range(3)]
    await asyncio.sleep(0)
    verifier.close()
    results = await asyncio.gather(*pending, return_exceptions=True)
    assert [type(result) for result in results] == [EvaluationFailed] * 3


def test_a_killed_platform_process_leaves_no_busy_verifier() -> None:
    program = (
        "import asyncio, sys, threading\n"
        "from rollouts.rewards.isolated import MathVerifier\n"
        "v = MathVerifier(processes=2, timeout=3.0)\n"
        "v.check_gold('1')\n"
        "print('ready', flush=True)\n"
        f"asyncio.run(v.verify('32', {HANGS!r}))\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == b"ready\n"
        children = psutil.Process(parent.pid).children()
        os.kill(parent.pid, signal.SIGKILL)
    assert children
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive
