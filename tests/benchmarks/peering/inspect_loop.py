"""inspect_ai on the work of `tests.benchmarks.peers`: it continues until no tool is called.

python inspect_loop.py URL PROMPTS AGENTS [BYTES]

BYTES is the length of the random text in a tool's results; without it there is none.
"""

import os
import random
import sys
import tempfile

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.solver import generate, system_message, use_tools
from inspect_ai.tool import tool


@tool
def step():  # type: ignore[no-untyped-def]
    """Its tool."""

    async def execute(number: int) -> str:
        """Take one step.

        Args:
            number: Which one.
        """
        more = int(sys.argv[4]) if len(sys.argv) > 4 else 0
        return f"step {number}" + "".join(random.choices("abcdefghijklmnopqrstuvwxyz  ", k=more))

    return execute


def main() -> None:
    """Run them all."""
    url, prompts, agents = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    os.environ["OPENAI_API_KEY"] = "no-key"
    system = "You work through a list of steps, one call at a time, and say when all is done. " * 14
    task = Task(
        dataset=[Sample(input=f"Question number {n}") for n in range(prompts)],
        solver=[system_message(system), use_tools(step()), generate(tool_calls="loop")],
    )
    with tempfile.TemporaryDirectory() as logs:
        (log,) = eval(
            task,
            model="openai/m",
            model_base_url=f"{url}/v1",
            model_args={"responses_api": False},
            max_connections=agents,
            max_samples=agents,
            display="none",
            log_dir=logs,
        )
    sys.exit(log.status != "success")


if __name__ == "__main__":
    main()
