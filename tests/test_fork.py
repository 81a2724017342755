"""A fork of a process that has a device open: an error where there was a hang, and an end without one."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from xinfer_vk.vulkan.guard import ForkableLock

if not hasattr(os, "fork"):
    pytest.skip("this system does not fork", allow_module_level=True)

CODE = """
import os, sys
import numpy as np
from xinfer_vk.errors import UsageError
from xinfer_vk.kernels.copy_words import copy_words
from xinfer_vk.plan import BufferKind, Plan
from xinfer_vk.vulkan.runtime import open_runtime

def works(rt):
    a, b = (rt.allocate(name, 64, BufferKind.RESULT) for name in "ab")
    plan = rt.prepare(Plan("copy", (copy_words(a, 0, b, 0, 64),)))
    rt.write(a, 0, np.arange(64, dtype=np.uint32))
    plan.run()
    assert (rt.read(b, 0, 64) == np.arange(64)).all()
    return plan, a

device, what = sys.argv[1:]
rt = open_runtime(device)
if what == "closed before":
    works(rt)
    rt.close()
else:
    plan, buffer = works(rt)
child = os.fork()
if child == 0:
    refused = {
        "run": lambda: plan.run(),
        "allocate": lambda: rt.allocate("late", 4, BufferKind.RESULT),
        "write": lambda: rt.write(buffer, 0, np.zeros(1, np.uint32)),
        "free": lambda: rt.free(buffer),
        "prepare": lambda: rt.prepare(Plan("again", plan._steps)),
        "open": lambda: open_runtime(device),
    }
    if what in refused:
        try:
            refused[what]()
        except UsageError as error:
            print(error, flush=True)
    elif what == "release":
        plan.release()
        rt.close()
        rt = plan = None
    sys.exit(7)
print("status", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
if what != "closed before":
    works(rt)  # the parent's device is as it was
print("parent goes on", flush=True)
"""
TIMEOUT_S = 60  # far more than it takes: what hangs, hangs for ever


def fork(device, what: str) -> list[str]:
    command = [sys.executable, "-c", CODE, str(device.index), what]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("what", ["run", "allocate", "write", "free", "prepare", "open"])
def test_a_device_in_a_fork_is_refused_with_the_remedy(device, what):
    message, *rest = fork(device, what)
    assert "is a fork of process" in message and "spawn" in message
    assert rest == ["status 7", "parent goes on"]


HELD = """
import os, sys, threading
import numpy as np
from xinfer_vk import LLM
from xinfer_vk.errors import UsageError

model, device, what = sys.argv[1:]
llm = LLM(model, device=device)
alone = llm.generate([5, 6], max_new_tokens=8, ignore_eos=True).token_ids
held, forked = threading.Event(), threading.Event()

def hold():
    with llm._lock, llm.runtime.turns:
        held.set()
        forked.wait()

other = threading.Thread(target=hold)
other.start()
held.wait()
child = os.fork()
if child == 0:
    if what == "close":
        llm.close()
    else:
        try:
            llm.generate([5, 6]) if what == "generate" else llm.runtime.counters() and llm.logits([5])
        except UsageError as error:
            print(error, flush=True)
    sys.stdout.flush()
    os._exit(7)
status = os.waitpid(child, 0)[1]
forked.set()
other.join()
print("status", os.waitstatus_to_exitcode(status))
assert llm.generate([5, 6], max_new_tokens=8, ignore_eos=True).token_ids == alone
print("parent goes on", flush=True)
"""


@pytest.mark.parametrize("what", ["generate", "logits", "close"])
def test_a_fork_does_not_wait_for_a_thread_that_it_does_not_have(device, tiny_model, what):
    command = [sys.executable, "-c", HELD, str(tiny_model), str(device.index), what]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0 and not done.stderr, done.stderr
    *messages, status, parent = done.stdout.splitlines()
    assert [status, parent] == ["status 7", "parent goes on"]
    assert len(messages) == (what != "close") and all("is a fork of process" in line for line in messages)


def test_a_lock_taken_in_the_parent_is_left_in_the_fork():
    lock = ForkableLock()
    with lock, lock:
        child = os.fork()
        if child == 0:
            with lock:
                pass
    if child == 0:
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    taken = []
    with lock:
        thread = threading.Thread(target=lambda: [lock.__enter__(), taken.append(True), lock.__exit__()])
        thread.start()
        thread.join(0.05)
        assert not taken
    thread.join()
    assert taken


@pytest.mark.parametrize("what", ["exit", "release"])
def test_a_fork_ends_without_touching_the_device(device, what):
    assert fork(device, what) == ["status 7", "parent goes on"]
