"""The interpreter that runs a task's cells, one after the other, in one namespace.

It is a fork of the server, so no Python has to be started; only an image with its own Python starts
one. It reads code from a descriptor given by number: four bytes of length, then the code. After
each cell it writes a line of JSON there: `exit_code` (1 for an exception), `value` (the `repr` of a
last expression, if not None), `threads` (number of those that run on) and `plots` (files of open
figures).
"""

from __future__ import annotations

import _thread
import ast
import contextlib
import io
import json
import linecache
import os
import signal
import struct
import sys
import traceback
import types
import warnings
from typing import Any


def main() -> None:
    """Run cells as a program of its own, in the Python of an image."""
    run_cells(int(sys.argv[1]), int(sys.argv[2]))


def run_cells(control: int, max_chars: int) -> None:
    """Run cells until the other end of the descriptor is closed."""
    if sys.flags.no_site:
        import site

        site.main()
    sys.meta_path.remove(globals()["__loader__"])  # it finds only our programs
    os.set_inheritable(control, False)
    for name in [name for name in sys.modules if name.startswith("toolsets")]:
        del sys.modules[name]
    # A new module for cells, without our names, in which pickle finds the classes of cells.
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    sys.argv = [""]
    # After the imports above, so that no file of the workspace replaces an imported module.
    sys.path.insert(0, os.getcwd())
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, errors="backslashreplace")
    warnings.filterwarnings("ignore", message="FigureCanvasAgg is non-interactive")
    own = os.getpid()
    number = plots = 0
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while (code := _receive(control)) is not None:
        number += 1
        outcome = _run(code.decode(), f"<cell {number}>", module.__dict__, max_chars)
        if os.getpid() != own:  # a child that the cell forked must not run further cells
            os._exit(int(outcome["exit_code"]))
        outcome["plots"] = _save_plots(plots)
        plots += len(outcome["plots"])
        _send(control, json.dumps(outcome).encode() + b"\n")


_OWN_FILE = run_cells.__code__.co_filename


def _run(source: str, name: str, scope: dict[str, Any], max_chars: int) -> dict[str, Any]:
    exit_code = 0
    value = None
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    try:
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            value = _evaluate(source, name, scope, max_chars)
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
    except SystemExit as error:
        exit_code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException as error:
        exit_code = 1
        _show(error)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    return {"exit_code": exit_code, "value": value, "threads": _thread._count()}


def _evaluate(source: str, name: str, scope: dict[str, Any], max_chars: int) -> str | None:
    tree = ast.parse(source, name)
    last = tree.body[-1] if tree.body else None
    if not isinstance(last, ast.Expr):
        exec(compile(tree, name, "exec", dont_inherit=True), scope)
        return None
    tree.body.pop()
    exec(compile(tree, name, "exec", dont_inherit=True), scope)
    value = eval(compile(ast.Expression(last.value), name, "eval", dont_inherit=True), scope)
    if value is None:
        return None
    scope["_"] = value
    text = repr(value).encode("utf-8", "backslashreplace").decode()
    if len(text) <= max_chars:
        return text
    half = max_chars // 2
    cut = len(text) - 2 * half
    return f"{text[:half]}\n[... {cut} characters cut ...]\n{text[len(text) - half :]}"


def _show(error: BaseException) -> None:
    """Print a traceback, if possible without the frames of this program."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in (_OWN_FILE, ast.__file__):
        trace = trace.tb_next
    try:
        traceback.print_exception(type(error), error, trace)
    except BaseException:
        print(f"{type(error).__name__}, which cannot be shown", file=sys.stderr)


def _save_plots(saved: int) -> list[str]:
    """Save and close the figures that a cell left open, as notebooks show them."""
    plt: Any = sys.modules.get("matplotlib.pyplot")
    names: list[str] = []
    try:
        for figure in plt.get_fignums() if plt is not None else ():
            name = f"plot-{saved + len(names) + 1}.png"
            plt.figure(figure).savefig(name)
            names.append(name)
        if names:
            plt.close("all")
    except Exception as error:
        _show(error)
    return names


def _receive(control: int) -> bytes | None:
    header = _read(control, 4)
    return None if header is None else _read(control, struct.unpack(">I", header)[0])


def _read(control: int, size: int) -> bytes | None:
    raw = bytearray()
    while len(raw) < size:
        chunk = os.read(control, min(1 << 20, size - len(raw)))
        if not chunk:
            return None
        raw += chunk
    return bytes(raw)


def _send(control: int, line: bytes) -> None:
    while line:
        line = line[os.write(control, line) :]
