"""Pools whose workers hang, crash, starve and are killed: all bounded, and no good answer lost."""

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import wait
from pathlib import Path

import pytest

from sgpo_jax.config import RewardsConfig
from sgpo_jax.rewards import VerifierPool, judge_all
from sgpo_jax.rewards.pool import MAX_CHARS
from sgpo_jax.types import Judgement, MachineError, Query, Verdict

LIMIT_S = 2.0
CONFIG = RewardsConfig(time_limit_s=LIMIT_S, memory_limit_mb=1024)
PATIENT = RewardsConfig(time_limit_s=60)
BAD_REWARDS = """
import os, signal, sys, time

def no_jax(gold, completion, metadata):
    return "jax" not in sys.modules and "flax" not in sys.modules

def hang(gold, completion, metadata):
    time.sleep(1000)

def hang_in_c(gold, completion, metadata):
    return 9 ** (9 ** 9) > 1

def hang_deaf(gold, completion, metadata):
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(1000)

def starve(gold, completion, metadata):
    return len(bytearray(8 * 2**30)) > 0

def abort(gold, completion, metadata):
    os.abort()

def leave(gold, completion, metadata):
    sys.exit(3)

def fail(gold, completion, metadata):
    raise RuntimeError("no such luck")

def answer_nonsense(gold, completion, metadata):
    return "correct"

def spawn_and_hang(gold, completion, metadata):
    child = os.fork()
    if child == 0:
        time.sleep(1000)
        os._exit(0)
    with open(completion, "w") as sink:
        sink.write(str(child))
    time.sleep(1000)

def note_and_hang(gold, completion, metadata):
    process_id(gold, completion, metadata)
    return 9 ** (9 ** 9) > 1

def length(gold, completion, metadata):
    return len(completion) == int(gold)

def process_id(gold, completion, metadata):
    with open(completion, "w") as sink:
        sink.write(str(os.getpid()))
    return True
"""


@pytest.fixture
def bad_rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bad_rewards.py").write_text(BAD_REWARDS)
    monkeypatch.syspath_prepend(tmp_path)


def query(kind: str, gold: str = "5", **metadata: object) -> Query:
    return Query("id", "question", gold, kind, "source", "prompt", (), metadata)


def is_alive(process_id: int) -> bool:
    """Whether the process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition, limit_s: float) -> bool:
    end = time.monotonic() + limit_s
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


def test_judges_in_the_order_of_the_pairs():
    answers = [str(n % 7) for n in range(200)]
    with VerifierPool(PATIENT) as pool:
        judged = judge_all(pool, [(query("math", "3"), rf"so \boxed{{{answer}}}") for answer in answers])
    assert [judgement.verdict is Verdict.CORRECT for judgement in judged] == [answer == "3" for answer in answers]
    assert judged[4] == Judgement(Verdict.WRONG, 0.0, "4")


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("hang", "not judged within 2 s"),
        ("hang_in_c", "not judged within 2 s"),
        ("hang_deaf", "not judged within 2 s"),
        ("starve", "memory"),
        ("abort", f"exit code -{signal.SIGABRT.value}"),
        ("leave", "SystemExit"),
        ("fail", "no such luck"),
        ("answer_nonsense", "Judgement"),
        ("missing", "cannot be imported"),
    ],
)
def test_what_cannot_be_judged_is_an_error_with_its_reason(bad_rewards, function: str, reason: str):
    with VerifierPool(CONFIG) as pool:
        bad = pool.submit(query(f"bad_rewards:{function}"), "text")
        good = [pool.submit(query("math"), r"\boxed{5}") for _ in range(20)]
        judgement = bad.result(timeout=10 * LIMIT_S)
        assert judgement.verdict is Verdict.ERROR
        assert judgement.reward == 0.0
        assert reason in judgement.detail
        assert all(future.result(timeout=10 * LIMIT_S).verdict is Verdict.CORRECT for future in good)


def test_workers_import_no_jax(bad_rewards):
    with VerifierPool(CONFIG) as pool:
        assert pool.submit(query("bad_rewards:no_jax"), "").result().verdict is Verdict.CORRECT


def test_hung_answers_among_good_ones_cost_their_limit_only():
    hung = r"\boxed{\sum_{k=1}^{10^{9}} \frac{1}{k^k}}"
    texts = [hung if n % 50 == 0 else rf"\boxed{{{n % 2}}}" for n in range(200)]
    begin = time.monotonic()
    with VerifierPool(CONFIG) as pool:
        judged = judge_all(pool, [(query("math", "1"), text) for text in texts])
    assert time.monotonic() - begin < 4 * LIMIT_S / 2 + 20
    for text, judgement in zip(texts, judged, strict=True):
        expected = {hung: Verdict.ERROR, r"\boxed{1}": Verdict.CORRECT, r"\boxed{0}": Verdict.WRONG}[text]
        assert judgement.verdict is expected


def test_workers_killed_at_random_lose_nothing():
    with VerifierPool(PATIENT) as pool:
        futures = [pool.submit(query("math"), rf"\boxed{{\sqrt{{25}}+{n}-{n}}}") for n in range(500)]
        draw, num_killed, num_seen = random.Random(0), 0, 0
        while wait(futures, timeout=0.02).not_done:
            workers = [process for process in multiprocessing.active_children() if process.is_alive()]
            num_done = sum(future.done() for future in futures)
            # On a loaded machine too, answers get through between two kills: else one would be hit at every attempt.
            if workers and num_done >= num_seen + 20:
                os.kill(draw.choice(workers).pid, signal.SIGKILL)
                num_killed, num_seen = num_killed + 1, num_done
        lost = [judged for future in futures if (judged := future.result()).verdict is not Verdict.CORRECT]
    assert num_killed >= 3
    assert len(lost) <= 1, lost  # only one that was hit three times may be lost


def test_idle_worker_that_was_killed_is_replaced():
    with VerifierPool(PATIENT) as pool:
        assert pool.submit(query("math"), r"\boxed{5}").result().verdict is Verdict.CORRECT
        for worker in multiprocessing.active_children():
            worker.kill()
            worker.join()
        futures = [pool.submit(query("math"), r"\boxed{5}") for _ in range(10)]
        assert all(future.result(timeout=20).verdict is Verdict.CORRECT for future in futures)


def test_a_worker_that_cannot_start_stalls_nothing(monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object) -> None:
        raise OSError("out of processes")

    with VerifierPool(PATIENT) as pool:
        for worker in multiprocessing.active_children():
            worker.kill()
            worker.join()
        with monkeypatch.context() as patch:
            patch.setattr("sgpo_jax.rewards.pool._Worker", fail)
            judgement = pool.submit(query("math"), r"\boxed{5}").result(timeout=20)
            assert judgement.verdict is Verdict.ERROR
            assert "out of processes" in judgement.detail
        assert pool.submit(query("math"), r"\boxed{5}").result(timeout=20).verdict is Verdict.CORRECT


def test_any_thread_may_submit():
    judged: list[Judgement] = []
    with VerifierPool(PATIENT) as pool:

        def work() -> None:
            judged.extend(judge_all(pool, [(query("math"), r"\boxed{5}")] * 20))

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert [judgement.verdict for judgement in judged] == [Verdict.CORRECT] * 160


def test_children_of_a_hung_verifier_die_with_it(bad_rewards, tmp_path: Path):
    note = tmp_path / "child"
    with VerifierPool(CONFIG) as pool:
        assert pool.submit(query("bad_rewards:spawn_and_hang"), str(note)).result(20).verdict is Verdict.ERROR
        assert wait_until(lambda: not is_alive(int(note.read_text())), 5)


def test_only_the_end_of_a_gigantic_completion_is_judged(bad_rewards):
    text = "x" * (50 * MAX_CHARS) + r"\boxed{5}"
    with VerifierPool(PATIENT) as pool:
        assert pool.submit(query("math"), text).result().verdict is Verdict.CORRECT
        assert pool.submit(query("bad_rewards:length", str(MAX_CHARS)), text).result().verdict is Verdict.CORRECT


def test_metadata_that_cannot_be_sent_is_an_error():
    with VerifierPool(PATIENT) as pool:
        judgement = pool.submit(query("math", thing=lambda: None), r"\boxed{5}").result()
        assert judgement.verdict is Verdict.ERROR
        assert pool.submit(query("math"), r"\boxed{5}").result().verdict is Verdict.CORRECT


def test_closing_ends_workers_and_waiting_answers(bad_rewards):
    before = set(multiprocessing.active_children())
    pool = VerifierPool(CONFIG)
    futures = [pool.submit(query("bad_rewards:hang"), "") for _ in range(6)]
    time.sleep(0.3)
    begin = time.monotonic()
    pool.close()
    pool.close()
    assert time.monotonic() - begin < 5
    assert all(future.done() for future in futures)
    assert set(multiprocessing.active_children()) <= before
    with pytest.raises(MachineError, match="closed"):
        pool.submit(query("math"), "")


PARENT = """
import sys, time
from sgpo_jax.config import RewardsConfig
from sgpo_jax.rewards import VerifierPool
from sgpo_jax.types import Query

def main():
    sys.path.insert(0, sys.argv[1])
    with VerifierPool(RewardsConfig(time_limit_s=4, num_workers=2)) as pool:
        def submit(kind, text=""):
            return pool.submit(Query("id", "", "5", kind, "", "", (), {}), text)
        submit("bad_rewards:process_id", sys.argv[1] + "/worker").result()
        try:
            submit("bad_rewards:note_and_hang", sys.argv[1] + "/hung")
            print("ready", flush=True)
            time.sleep(60)
        except KeyboardInterrupt:
            print("judged", submit("math", chr(92) + "boxed{5}").result().verdict, flush=True)

if __name__ == "__main__":
    main()
"""


@pytest.fixture
def parent(tmp_path: Path, bad_rewards):
    """A process of its own with a pool of two workers, one idle and one hung."""
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    process = subprocess.Popen(
        [sys.executable, script, tmp_path], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout.readline() == "ready\n"
    assert wait_until((tmp_path / "hung").exists, 10)
    yield process
    if process.poll() is None:
        process.kill()
    process.wait(10)
    process.stdout.close()


def test_workers_end_with_a_killed_parent(parent, tmp_path: Path):
    workers = [int((tmp_path / name).read_text()) for name in ("worker", "hung")]
    assert any(map(is_alive, workers))
    parent.kill()
    assert wait_until(lambda: not any(map(is_alive, workers)), 10)


def test_ctrl_c_reaches_the_parent_only(parent, tmp_path: Path):
    os.killpg(parent.pid, signal.SIGINT)
    output, _ = parent.communicate(timeout=20)
    assert output == "judged correct\n"
    assert parent.returncode == 0
    workers = [int((tmp_path / name).read_text()) for name in ("worker", "hung")]
    assert wait_until(lambda: not any(map(is_alive, workers)), 5)
