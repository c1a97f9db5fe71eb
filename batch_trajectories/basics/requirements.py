"""Check Python and dependencies first, for a clear message instead of a traceback.

Interpreters that are too old for the rest of the program must be able to read this file.
"""

import importlib.util
import sys
from pathlib import Path

OLDEST = (3, 11)
"""The oldest Python that runs the program; as in pyproject.toml."""

PACKAGES = (
    "aiohttp",
    "anthropic",
    "click",
    "datasets",
    "genai_prices",
    "httpx2",
    "huggingface_hub",
    "jinja2",
    "msgspec",
    "openai",
    "orjson",
    "pydantic",
    "pyarrow",
    "yaml",
    "regex",
    "tenacity",
    "tqdm",
    "truststore",
    "yarl",
)
"""The import names of the dependencies, in the order of pyproject.toml."""


def check_requirements(program: str) -> None:
    """Say what to do and exit with 2 if the interpreter cannot run `program`."""
    problem = requirements_problem(program, sys.version_info[:2])
    if problem is not None:
        sys.stderr.write("error: " + problem + "\n")
        sys.exit(2)


def requirements_problem(program: str, version: "tuple[int, int]") -> "str | None":
    """The reason why Python `version` here cannot run `program`, with advice; None if it can."""
    oldest = ".".join(map(str, OLDEST))
    if version < OLDEST:
        version_text = ".".join(map(str, version))
        what = f"{program} needs Python {oldest} or newer; {sys.executable} is {version_text}"
        return f"{what}. {_advice(program, 'python' + oldest)}"
    if sys.flags.optimize > 1:
        return (
            f"{program} cannot run without docstrings, which describe its tools to the model: "
            "unset PYTHONOPTIMIZE and leave out python -OO"
        )
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        what = f"{sys.executable} does not have what the program needs ({', '.join(missing)})"
        return f"{what}. {_advice(program, 'python3')}"
    return None


def _advice(program: str, python: str) -> str:
    root = Path(__file__).resolve().parents[2]
    environment = root / ".venv"
    installed = environment / "bin" / "python"
    if installed.exists() and Path(sys.prefix).resolve() != environment:
        return f"There is an environment with it: start as {installed} {root / program} ..."
    make = f"{python} -m venv .venv && .venv/bin/pip install -e ."
    return f"In {root}: {make}; then start as .venv/bin/python {program} ..."
