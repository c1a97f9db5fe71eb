"""Resource limits put on each process of a command."""

from __future__ import annotations

import resource
from collections.abc import Sequence

from toolsets.execution import Limits


def limited(argv: Sequence[str], limits: Limits) -> list[str]:
    """Return a command that runs `argv` under `limits`, or not at all.

    Memory is bounded as the data segment, not as address space, of which some runtimes reserve
    far more than they use. A limit the machine has already set lower stays.
    """
    data_kib = _at_most(limits.memory_mb << 20, resource.RLIMIT_DATA) >> 10
    file_blocks = _at_most(limits.file_mb << 20, resource.RLIMIT_FSIZE) >> 9
    script = f'ulimit -c 0 && ulimit -f {file_blocks} && ulimit -d {data_kib} && exec "$@"'
    return ["/bin/sh", "-c", script, "sh", *argv]


def _at_most(wanted: int, kind: int) -> int:
    hard = resource.getrlimit(kind)[1]
    return wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
