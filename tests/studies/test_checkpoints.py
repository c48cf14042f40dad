"""Checkpoints: whatever happens to a process or a file, one good state is there, and it is known to be good."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import pickle
import random
import signal
import subprocess
import sys
import time

import pytest
import torch

from eigenoise import storage
from eigenoise.studies import checkpoints
from eigenoise.studies.checkpoints import MAGIC, Checkpoints, digest, read
from eigenoise.studies.recipes import PRESETS
from eigenoise.studies.regression.study import Run, run_uci

SETTINGS = {"set": "boston", "splits": 2}


def state(step: int) -> dict:
    return {"step": step, "weights": torch.arange(100.0) + step, "nested": [torch.tensor(step), {"a": 0.5}]}


@pytest.fixture
def states(tmp_path) -> Checkpoints:
    return Checkpoints(tmp_path / ".run.checkpoint", SETTINGS)


def resumed(states: Checkpoints) -> int | None:
    steps: list[int] = []
    states.resume(lambda state: steps.append(state["step"]))
    return steps[0] if steps else None


def test_the_last_two_states_are_kept(states):
    assert not states.exist
    assert resumed(states) is None
    for step in (1, 2, 3):
        states.seconds_spent = 10.0 * step
        states.save(state(step))
    assert [read(path)["state"]["step"] for path in (states.path, states.older)] == [3, 2]
    assert sorted(path.name for path in states.path.parent.iterdir()) == [states.path.name, states.older.name]
    states.seconds_spent = 0.0
    assert resumed(states) == 3
    assert states.seconds_spent == 30.0
    states.remove()
    assert list(states.path.parent.iterdir()) == []


@pytest.mark.parametrize("harm", ["flip", "cut", "empty", "gone", "other", "old"])
def test_a_damaged_file_is_passed_over_for_the_one_before(states, harm):
    states.save(state(1))
    states.save(state(2))
    content = bytearray(states.path.read_bytes())
    if harm == "gone":  # as if killed between the two renames
        states.path.unlink()
        assert resumed(states) == 1
        return
    content[-1000] ^= 1
    plain = io.BytesIO()
    torch.save({"settings": json.dumps(SETTINGS), "state": state(2), "seconds": 0.0}, plain)
    wrong = {"flip": bytes(content), "cut": bytes(content[:-10]), "empty": b"", "other": b"{}", "old": plain.getvalue()}
    states.path.write_bytes(wrong[harm])
    with pytest.warns(RuntimeWarning, match="the run resumes from the state before it"):
        assert resumed(states) == 1
    assert states.path.with_name(states.path.name + ".damaged").read_bytes() == wrong[harm]
    states.save(state(3))  # does not put the damaged file in the place of the good one
    assert resumed(states) == 3
    states.path.unlink()
    assert resumed(states) == 1


def test_if_no_file_is_good_they_are_left_as_they_are(states):
    states.path.write_bytes(b"rubbish")
    states.older.write_bytes(b"")
    with pytest.raises(ValueError, match="delete it to restart this run"):
        resumed(states)
    assert states.path.read_bytes() == b"rubbish"


def test_any_flipped_bit_is_noticed(states):
    states.save(state(1))
    content = states.path.read_bytes()
    chance = random.Random(0)
    places = [*range(len(MAGIC) + 66), *(chance.randrange(len(content)) for _ in range(300))]
    for place in places:
        wrong = bytearray(content)
        wrong[place] ^= 1 << chance.randrange(8)
        states.path.write_bytes(wrong)
        if place == len(MAGIC) + 64:  # the line's end, which says nothing
            continue
        with pytest.raises(ValueError, match=r"no checkpoint|damaged"):
            read(states.path)


def test_a_state_that_does_not_fit_is_an_error_and_the_file_stays(states):
    states.save(state(1))

    def refuse(state):
        raise KeyError("weight")

    with pytest.raises(ValueError, match=r"cannot be used \('weight'\)"):
        states.resume(refuse)
    with pytest.raises(ValueError, match="stopped run of other settings"):
        Checkpoints(states.path, {**SETTINGS, "splits": 3}).resume(lambda state: None)
    assert resumed(states) == 1


class Evil:
    def __reduce__(self):
        return os.system, ("touch /tmp/eigenoise-was-here",)


def test_code_in_a_file_is_not_run(states, tmp_path):
    payload = pickle.dumps({"settings": json.dumps(SETTINGS), "state": Evil(), "seconds": 0.0})
    states.path.write_bytes(MAGIC + hashlib.sha256(payload).hexdigest().encode() + b"\n" + payload)
    with pytest.raises(ValueError, match="no checkpoint of this version"):
        resumed(states)
    assert not os.path.exists("/tmp/eigenoise-was-here")


@pytest.mark.parametrize("dies_in", ["fill", "sync", "first rename", "second rename", "done"])
def test_wherever_a_save_ends_a_whole_state_is_there(states, monkeypatch, dies_in):
    states.save(state(1))
    states.save(state(2))
    calls = {"count": 0}
    replace = os.replace

    class Killed(BaseException):
        """As by SIGKILL: nothing may be relied on to catch it."""

    def rename(*args):
        calls["count"] += 1
        if calls["count"] == {"first rename": 1, "second rename": 2}.get(dies_in):
            raise Killed
        replace(*args)

    def sync(path, mode, real=storage._sync):
        if dies_in == "sync":
            raise Killed
        real(path, mode)

    monkeypatch.setattr(os, "replace", rename)
    monkeypatch.setattr(storage, "_sync", sync)
    if dies_in == "fill":
        monkeypatch.setattr(torch, "save", lambda *args: (_ for _ in ()).throw(Killed))
    with contextlib.suppress(Killed):
        states.save(state(3))
    monkeypatch.undo()
    assert resumed(states) == (3 if dies_in == "done" else 2)


def test_what_a_killed_process_left_is_swept_away(states):
    states.save(state(1))
    left = states.path.parent / f".{states.path.name}.abcd_123"
    mine = states.path.parent / f".{states.path.name}.notes.txt"
    left.write_bytes(b"half")
    mine.write_bytes(b"a user's")
    assert resumed(states) == 1
    assert not left.exists()
    assert mine.exists()


def test_saves_come_by_step_and_by_time(states, monkeypatch):
    saved: list[int] = []
    monkeypatch.setattr(Checkpoints, "save", lambda self, state: saved.append(state["step"]))
    now = {"time": 0.0, "step": 0}
    monkeypatch.setattr(time, "monotonic", lambda: now["time"])

    def steps():
        for step in range(1, 11):
            now["step"] = step
            now["time"] += 1.0
            yield step

    states.steps, states.seconds = 4, 1e9
    list(states.saving(steps(), lambda: dict(now)))
    assert saved == [4, 8, 10]
    saved.clear()
    states.steps, states.seconds = 1000, 3.0
    list(states.saving(steps(), lambda: dict(now)))
    assert saved == [3, 6, 9, 10]
    assert states.seconds_spent == 20.0


def test_a_clock_that_goes_backwards_harms_nothing(states, monkeypatch):
    chance = random.Random(0)
    monkeypatch.setattr(time, "time", lambda: chance.uniform(0, 1e9))
    states.seconds = -1.0
    done = iter(range(1, 6))
    for _ in states.saving(range(1, 6), lambda: state(next(done))):
        os.utime(states.path.parent, (0, 0))
        if states.path.exists():
            os.utime(states.path, (chance.uniform(0, 1e9),) * 2)
    assert resumed(states) == 5
    assert 0 <= states.seconds_spent < 60


def test_a_full_disk_is_warned_about_and_the_run_goes_on(states, monkeypatch):
    states.save(state(1))
    states.steps = 2

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    seen = []
    monkeypatch.setattr(os, "fsync", full)
    with pytest.warns(RuntimeWarning, match="No space left on device.*the run continues"):
        seen.extend(states.saving(range(1, 4), lambda: state(9)))
    assert seen == [1, 2, 3]
    monkeypatch.undo()
    assert resumed(states) == 1
    assert [path.name for path in states.path.parent.iterdir()] == [states.path.name]


def test_a_file_that_may_not_grow_is_a_failed_save(tmp_path):
    program = """
import pathlib, resource, signal, sys, warnings
import torch
from eigenoise.studies.checkpoints import Checkpoints
states = Checkpoints(pathlib.Path(sys.argv[1]) / "run", {"splits": 2}, steps=1)
small, large = {"step": 1}, {"step": 2, "weights": torch.zeros(100_000)}
states.save(small)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
with warnings.catch_warnings(record=True) as found:
    warnings.simplefilter("always")
    list(states.saving([1, 2], lambda: large))
assert len(found) == 2 and "File too large" in str(found[0].message), found
states.resume(lambda state: print(state["step"]))
"""
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "1", done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_digest_tells_states_apart():
    same = digest(state(1))
    assert digest(state(1)) == same
    others = [
        state(2),
        {**state(1), "more": 0},
        {**state(1), "more": {}},
        {**state(1), "weights": (torch.arange(100.0) + 1).half()},
    ]
    others += [{**state(1), "nested": [torch.tensor(1), {"a": 0.5 + 1e-16 * 2}]}]
    others += [{**state(1), "weights": (torch.arange(100.0) + 1).reshape(10, 10)}]
    changed = state(1)
    changed["weights"][50] = torch.nextafter(changed["weights"][50], torch.tensor(1e9))
    assert same not in [digest(other) for other in [*others, changed]]


BOSTON = Run("boston", "noisy-ekfac", PRESETS["paper"], splits=2, epochs=12)


@pytest.fixture
def hears_nothing(monkeypatch):
    monkeypatch.setattr(Run, "SAVE_SECONDS", 0.0)


def _run_in_a_child(out, delay: float) -> int:
    """Start the run in a forked process and kill it after ``delay`` seconds; its exit status."""
    child = os.fork()
    if child == 0:
        try:
            run_uci(BOSTON, out)
            os._exit(0)
        except BaseException:
            os._exit(1)
    time.sleep(delay)
    os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # fork beside threads: here there is none that matters
def test_a_run_that_is_killed_again_and_again_ends_as_if_it_never_was(no_cache, tmp_path, hears_nothing):
    torch.set_num_threads(1)
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    straight.mkdir()
    killed.mkdir()
    wanted = run_uci(BOSTON, straight)
    chance = random.Random(0)
    statuses = [_run_in_a_child(killed, chance.uniform(0.05, 0.5)) for _ in range(8)]
    assert set(statuses) <= {0, signal.SIGKILL}
    found = run_uci(BOSTON, killed)
    for result in (wanted, found):
        del result["seconds"]
    assert json.dumps(found) == json.dumps(wanted)
    assert len(found["digest"]) == 64


def test_being_asked_to_end_saves_and_says_how_to_go_on(no_cache, tmp_path):
    command = [sys.executable, "-m", "eigenoise", "uci", "boston", "--method", "noisy-ekfac", "--preset", "paper"]
    command += ["--epochs", "100000", "--splits", "1", "--out", str(tmp_path)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    path = tmp_path / ".boston-noisy-ekfac-paper.checkpoint"
    try:
        deadline = time.monotonic() + 120
        while "ELBO" not in (line := process.stderr.readline()):  # type: ignore[union-attr]
            assert line, "it never began"
            assert time.monotonic() < deadline
        process.send_signal(signal.SIGTERM)
        _, words = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "stopped; the same command continues from the last checkpoint" in words
    assert read(path)["state"]["curve"]


def test_every_save_is_of_a_whole_state(states):
    """What is saved is what ``state`` gave then, not what became of its tensors later."""
    weights = torch.zeros(3)

    def steps():
        for step in range(1, 5):
            weights.add_(1)
            yield step

    states.steps = 2
    list(states.saving(steps(), lambda: {"step": 0, "weights": weights}))
    assert [read(path)["state"]["weights"].tolist() for path in (states.older, states.path)] == [[2.0] * 3, [4.0] * 3]
    assert checkpoints.SAVE_STEPS > 0
