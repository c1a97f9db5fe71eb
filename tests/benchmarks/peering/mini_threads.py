"""mini-swe-agent on the work of `tests.benchmarks.peers`, in threads as in its batch command.

python mini_threads.py URL PROMPTS AGENTS TURNS [nowhere|local|bwrap]

Nowhere, its environment answers without running anything. An agent ends at its limit of steps.
"""

import os
import sys
from concurrent.futures import ThreadPoolExecutor

os.environ |= {"OPENAI_API_KEY": "no-key", "MSWEA_SILENT_STARTUP": "1"}
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or it waits for a download at its start

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.extra.bubblewrap import BubblewrapEnvironment
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

SYSTEM = "You work through a list of steps, one call at a time, and say when all is done. " * 14


class Nowhere:
    """An environment in which nothing is done."""

    config = None

    def execute(self, action, cwd=""):  # type: ignore[no-untyped-def]
        """What a command gives."""
        return {"output": f"step {action}", "returncode": 0, "exception_info": ""}

    def get_template_vars(self, **given):  # type: ignore[no-untyped-def]
        """Nothing to know."""
        return given

    def serialize(self):  # type: ignore[no-untyped-def]
        """Nothing to keep."""
        return {}


ENVIRONMENTS = {"nowhere": Nowhere, "local": LocalEnvironment, "bwrap": BubblewrapEnvironment}


def main() -> None:
    """Run them all."""
    url, prompts, agents, turns = sys.argv[1], *map(int, sys.argv[2:5])
    environment = ENVIRONMENTS[sys.argv[5]]

    def converse(number: int) -> None:
        model = LitellmModel(
            model_name="openai/m",
            model_kwargs={"api_base": f"{url}/v1"},
            cost_tracking="ignore_errors",
        )
        agent = DefaultAgent(
            model,
            environment(),
            system_template=SYSTEM,
            instance_template="{{task}}",
            step_limit=turns,
        )
        agent.run(f"Question number {number}")

    with ThreadPoolExecutor(agents) as threads:
        list(threads.map(converse, range(prompts)))


if __name__ == "__main__":
    main()
