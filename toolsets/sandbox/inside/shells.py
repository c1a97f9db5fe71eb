"""The loop that a persistent shell runs, and how commands are sent to it."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

CONTROL = 250
"""The descriptor on which a shell or interpreter receives code and reports the end of a call."""
SH_CONTROL = 7


class Shell(NamedTuple):
    """A shell that runs a loop, and how to send it a command."""

    argv: list[str]
    control: int
    encode: Callable[[str], bytes]


# The shell's own errors are discarded, so that `set -x` does not show this loop. A redirection of
# `eval` is undone when it ends. So a command cannot change the loop's output for good, and the
# descriptors of this loop are closed for the processes of a command. `$?` is restored for each
# command, as the model expects it.
# `read -N` takes many characters with one system call; as ASCII, they are bytes in any locale.
_EXACTLY = "-d '' -n" if sys.platform == "darwin" else "-N"  # the bash of macOS is too old for -N
_BASH_LOOP = f"""\
shopt -s expand_aliases
__end_as() {{ return "$1"; }}
exec 251>&1 252>&2 2>/dev/null
__status=0
while IFS= read -r -u 250 {_EXACTLY} 8 __size &&
  IFS= read -r -u 250 {_EXACTLY} "$__size" __command; do
  printf -v __command %b "$__command"
  [ "$__status" = 0 ] || __end_as "$__status"
  eval "$__command" </dev/null >&251 2>&252 250>&- 251>&- 252>&-
  __status=$?
  printf '%d %d\\n' "$__status" "${{!:-0}}" >&250
done
"""


def _prefix_size(code: str) -> bytes:
    raw = code.replace("\\", "\\\\").encode()
    if not raw.isascii():
        raw = re.sub(rb"[\x80-\xff]", lambda byte: b"\\0%03o" % ord(byte[0]), raw)
    return b"%08d" % len(raw) + raw


BASH = Shell(["bash", "--norc", "--noprofile", "-c", _BASH_LOOP, "bash"], CONTROL, _prefix_size)

# Other shells can only read whole lines, and have descriptors up to 9.
_SH_LOOP = """\
__end_as() { return "$1"; }
exec 8>&1 9>&2 2>/dev/null
__status=0
while IFS= read -r __command <&7; do
  __command=$(printf '%b.' "$__command")
  [ "$__status" = 0 ] || __end_as "$__status"
  eval "${__command%.}" </dev/null >&8 2>&9 7<&- 8>&- 9>&-
  __status=$?
  printf '%d %d\\n' "$__status" "${!:-0}" >&7
done
"""


def _on_one_line(code: str) -> bytes:
    return code.replace("\\", "\\0134").replace("\n", "\\0012").encode() + b"\n"


SH = Shell(["sh", "-c", _SH_LOOP, "sh"], SH_CONTROL, _on_one_line)


@cache
def find_shell() -> Shell:
    """Return the bash on the PATH, else any shell."""
    for place in os.get_exec_path():
        if os.access(path := f"{place}/bash", os.X_OK):
            # With its path, so that PATH is not searched again.
            return BASH._replace(argv=[path, *BASH.argv[1:]])
    return SH


def background_code(code: str, path: str) -> str:
    """Return code that starts `code` in a process group of its own, which can be killed as one."""
    quoted = "'" + code.replace("'", "'\\''") + "'"
    group = '[ -z "$BASH_VERSION" ] || case $- in *m*) ;; *) set -m; __m=1;; esac\n'
    start = f"{{ eval {quoted}; }} </dev/null >'{path}' 2>&1 &\n"
    return f"mkdir -p '{path.rpartition('/')[0]}' && : >'{path}' && {{\n{group}{start}" + (
        '[ -z "$__m" ] || { set +m; unset __m; }\n}'
    )
