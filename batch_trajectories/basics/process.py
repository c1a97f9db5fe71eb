"""Settings of the processes of a run: limits, logging, parent death, privacy."""

from __future__ import annotations

import codecs
import ctypes
import fcntl
import gc
import logging
import os
import re
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import NoReturn

from batch_trajectories.basics.text import CONTROLS

_OWN_LOGGERS = ("agent", "batch_trajectories", "run_agent", "toolsets")
"""The first words of the names of this program's loggers; those of libraries are named."""

_NOT_IN_LINES = re.compile(f"{CONTROLS.pattern[:-1]}\n\u2028\u2029\ud800-\udfff]")
"""Characters that would end or rewrite a line of the log, or that a file cannot hold."""

_PR_SET_PDEATHSIG, _PR_GET_DUMPABLE, _PR_SET_DUMPABLE = 1, 3, 4  # linux/prctl.h

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that stop a run."""

_QUIET_LOGGERS = ("aiohttp", "httpx2", "httpcore2", "asyncio")
"""Loggers of libraries that may quote requests."""


@contextmanager
def restore_settings() -> Iterator[None]:
    """At the end of a `with` block, undo the changes of the functions below to this process.

    So a run started from Python leaves the caller's logging, limits and privacy unchanged.
    """
    root = logging.getLogger()
    handlers, raises = root.handlers[:], logging.raiseExceptions
    levels = {logger: logger.level for logger in (root, *map(logging.getLogger, _QUIET_LOGGERS))}
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    dumpable = _dumpable()
    root.handlers = []  # `basicConfig` closes those that it replaces
    try:
        yield
    finally:
        for handler in root.handlers:
            handler.close()
        root.handlers = handlers
        logging.raiseExceptions = raises
        for logger, level in levels.items():
            logger.setLevel(level)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        if dumpable == 1:  # no process may set the third value, 2
            ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 1)


def _dumpable() -> int:
    """The flag of this process: 1 if others of this user may read /proc/PID/environ."""
    return int(ctypes.CDLL(None).prctl(_PR_GET_DUMPABLE)) if sys.platform == "linux" else 0


_RARELY = (100_000, 10, 20)
"""Thresholds of the collector: 1,024 conversations in flight stay below the first, in objects."""


def collect_garbage_rarely() -> None:
    """Run the garbage collector less often.

    Conversations in flight are many long-lived objects without cycles; by default, the collector
    takes about a tenth of a worker's time.
    """
    gc.freeze()
    gc.set_threshold(*_RARELY)
    gc.enable()


@contextmanager
def rare_garbage_collection() -> Iterator[None]:
    """Run the garbage collector less often inside a `with` block.

    While records are read, it would take a sixteenth of the time of an export.
    """
    before = gc.get_threshold()
    gc.set_threshold(*_RARELY)
    try:
        yield
    finally:
        gc.set_threshold(*before)


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Switch the garbage collector off inside a `with` block.

    Imports leave no garbage, and looking for some takes an eighth of a start.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent dies, and hide its environment."""
    hide_environment()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before the kernel was asked
        os._exit(1)


def hide_environment() -> None:
    """Keep other processes of this user from reading the API keys in /proc/PID/environ."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0)


def allow_many_files() -> None:
    """Raise the soft limit of open files to the hard limit: each conversation needs several."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def use_pidfd_watcher() -> None:
    """Let Python 3.11 watch child processes without a thread for each.

    Does nothing in later versions, which do so themselves, or if the system has no pidfd. Call it
    before the event loop starts.
    """
    if sys.version_info < (3, 12) and hasattr(os, "pidfd_open"):
        try:
            os.close(os.pidfd_open(os.getpid()))
        except OSError:
            return
        import asyncio

        asyncio.set_child_watcher(asyncio.PidfdChildWatcher())


def log_to(path: Path, level: str) -> None:
    """Log to `path`, a file that only its owner can read.

    Loggers of libraries may quote requests, so only their warnings are logged.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    os.close(os.open(path, flags, 0o600))
    _log_with(logging.FileHandler(path, encoding="utf-8"), level)


def log_through(send: Callable[[bytes], None], level: str) -> None:
    """Log by calling `send` with lines: warnings at once, other lines at `flush_log`."""
    _log_with(_SendingHandler(send), level)


def flush_log() -> None:
    """Send log lines that are held back."""
    for handler in logging.getLogger().handlers:
        handler.flush()


class _SendingHandler(logging.Handler):
    def __init__(self, send: Callable[[bytes], None]) -> None:
        super().__init__()
        self._send = send
        self._lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(f"{self.format(record)}\n")
        if record.levelno >= logging.WARNING:
            self.flush()

    def flush(self) -> None:
        with self.lock or nullcontext():
            lines, self._lines = self._lines, []
        if lines:
            self._send("".join(lines).encode("utf-8", "replace"))


class LogLine(logging.Formatter):
    r"""Makes a line of run.log: time (UTC), level, a sentence, and the worker that wrote it.

    Prompts, tools and servers may be quoted in the sentence. Line ends and terminal escapes in it
    are escaped, so no text from outside looks like a line of its own. The lines of a traceback are
    indented, and so none begins with a time.
    """

    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(record.created))
        sentence = _escape_lines(record.getMessage())
        if record.name.partition(".")[0] not in _OWN_LOGGERS:
            sentence = f"{record.name}: {sentence}"
        worker = "" if record.processName == "MainProcess" else f" ({record.processName})"
        lines = [f"{at}.{record.msecs:03.0f}Z {record.levelname} {sentence}{worker}"]
        if record.exc_info:
            lines += self.formatException(record.exc_info).split("\n")
        return "\n    ".join(_escape_lines(line) for line in lines)


def _escape_lines(text: str) -> str:
    return _NOT_IN_LINES.sub(
        lambda found: "\\n" if found[0] == "\n" else f"\\u{ord(found[0]):04x}", text
    )


def _log_with(handler: logging.Handler, level: str) -> None:
    handler.setFormatter(LogLine())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.raiseExceptions = False  # a log that cannot be written must not stop the work
    for name in _QUIET_LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING)


def ensure_utf8() -> None:
    """Start the command again in Python's UTF-8 mode if Python reads file names as ASCII.

    That is so with LC_ALL=C and UTF-8 mode switched off. Letters beyond ASCII would become lone
    surrogates: ids would match no record, and paths in a config could not be opened.
    """
    if sys.flags.utf8_mode or codecs.lookup(sys.getfilesystemencoding()).name != "ascii":
        return
    os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])


# Run as process 1, as in a container without an init.
#
# Processes that lose their parent become children of process 1. If it does not wait for them,
# dead processes accumulate until no new process can start.

# Signals by faults of this process itself must reach it at once.
_FAULTS = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP}


def fork_if_init() -> None:
    """Continue in a child if this is process 1, which then waits for all children.

    Call it before anything is open or running. Waiting for any child would take away exit statuses
    from code that has started children itself, so this needs a process of its own.
    """
    if os.getpid() != 1:
        return
    waited = signal.valid_signals() - _FAULTS
    before = signal.pthread_sigmask(signal.SIG_BLOCK, waited)
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    _run_as_init(child, waited)


def _run_as_init(child: int, waited: set[signal.Signals]) -> NoReturn:
    """Pass signals on to `child`, reap all processes that end, and exit like `child`."""
    while True:
        info = signal.sigwaitinfo(waited)
        if info.si_signo == signal.SIGCHLD:
            _reap_children(child)
        elif info.si_code <= 0:  # sent by a process; those of a terminal reach the child, too
            os.kill(child, info.si_signo)


def _reap_children(child: int) -> None:
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)  # never fails: `child` exists
        if pid == 0:
            return
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


# A lock that processes of this machine wait for.


@contextmanager
def lock_file(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file inside a `with` block; wait while another process has it.

    Creates the file if it is missing.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
