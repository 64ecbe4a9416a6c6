"""Other processes, for tests: real ones, forked off."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable


def in_child(work: Callable[[], None]) -> int:
    """Run `work` in a forked process; returns its pid. Its exit status is 0 if `work` returned."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return pid


def status_of(pid: int) -> int:
    """Exit status, or minus the signal that ended the process."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def dead_pid() -> int:
    """The number of a process that is no more."""
    pid = in_child(lambda: None)
    status_of(pid)
    return pid
