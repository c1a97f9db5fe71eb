"""The config of a run: every option once, with its type, default and help.

The command line and YAML files are both read into `RunConfig`; a flag wins over the file. Fields
marked as part of the meaning of the data decide what it is (`runs/config/fingerprint.py`); all
other fields may change between one start and the next.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    model_validator,
)

from agent.models.resolve import ENDPOINTS, SCRIPTED
from agent.options import (
    AgentOptions,
    PositiveFloat,
    PositiveInt,
    Seed,
    meaning,
    parse_json,
)
from runs.config.endpoints import Api, BaseUrl, Effort, EndpointConfig, ExtraBody, PriceConfig
from runs.config.option_types import (
    AcceptedRows,
    Names,
    Resource,
    Weight,
    parse_resources,
    plain_name,
)
from runs.dataset.row import ColumnUse, RowRules, script_use
from runs.shards import plain_shard
from toolsets.mcp.mcp_settings import McpServer, ServerName
from toolsets.net.web_settings import WebSettings

if TYPE_CHECKING:
    from toolsets.catalog.distributions import Distribution

_DEFAULT_MODEL = "anthropic/claude-sonnet-4"


def _running(default: Any, help: str, **more: Any) -> Any:
    """A field that decides how the work is done; it may change from start to start."""
    return Field(default, description=help, **more)


class RunConfig(AgentOptions):
    """All that a user decides about a run: about its conversations, and about itself."""

    dataset_file: Path = _running(..., "JSONL file with one prompt per line.")
    run_name: Annotated[str, AfterValidator(plain_name)] = _running(
        ..., "Name of the run and of its directory; the same name resumes.", max_length=120
    )
    output_dir: Path = _running(
        Path("trajectories"), "Where run directories and training files go."
    )
    model: str = meaning(
        _DEFAULT_MODEL,
        "Model: scripted, openai:NAME, anthropic:NAME, openrouter:NAME, or the NAME that the "
        "endpoint at --base_url knows.",
        min_length=1,
    )
    models: Annotated[dict[str, Weight] | None, BeforeValidator(parse_json)] = meaning(
        None,
        "Instead of --model: several models with their weights, as {NAME: WEIGHT}. Each "
        "conversation draws one; a row names its own in the column `model`.",
        min_length=1,
    )
    endpoints: Annotated[dict[str, EndpointConfig], BeforeValidator(parse_json)] = _running(
        {},
        "Endpoints of your own by name, best in a --config file: {NAME: {base_url, api, key_env, "
        "...}}; their models are NAME:MODEL.",
    )
    # No part of the meaning: what a reply cost does not change what it says.
    prices: Annotated[dict[str, PriceConfig], BeforeValidator(parse_json)] = _running(
        {},
        "Your own prices in dollars per million tokens, best in a --config file: {MODEL: {input, "
        "output, cache_read, cache_write}}. They win over the price table and what the endpoint "
        "says.",
    )
    base_url: BaseUrl | None = _running(
        None, "Root URL of the endpoint; default: that of the model's prefix, else OpenRouter."
    )
    api: Api | None = meaning(
        None, "Dialect of the endpoint, where the model's prefix does not say it."
    )
    key_env: str | None = _running(
        None,
        "Environment variable that holds the API key; 'none' for endpoints without keys.",
        min_length=1,
    )
    system_prompt: str | None = meaning(
        None, "System prompt of every conversation whose row brings none."
    )
    enabled_toolsets: Names | None = meaning(
        None,
        "Toolsets to offer, separated by commas; default: all but browser and web. 'none' offers "
        "no tools.",
    )
    disabled_toolsets: Names = meaning((), "Toolsets never to offer; wins over enabled ones.")
    tools: Names | None = meaning(
        None,
        "Your own tools, as toolsets: MODULE:ATTRIBUTE, or the name of an installed package's "
        "entry point, separated by commas.",
    )
    mcp: Annotated[dict[ServerName, McpServer] | None, BeforeValidator(parse_json)] = meaning(
        None,
        "MCP servers by name, each a toolset: `command` or `url`, and more; see docs/tools.md.",
    )
    distribution: str | None = meaning(
        None,
        "Instead of --enabled_toolsets: the name (see `distributions`) or YAML file of the "
        "percentages by which each conversation draws its toolsets.",
    )
    sandbox: Literal["bwrap", "docker", "local"] = meaning(
        "bwrap",
        "Where commands run: bwrap or docker (isolated), or local (NOT isolated: commands run with "
        "your rights).",
    )
    docker_image: str | None = meaning(
        None,
        "Image for --sandbox=docker, with python3 in it; rows may name their own in the column "
        "`docker_image` or `image`.",
    )
    row_setup: bool = meaning(
        False,
        "Set each workspace up by its row's columns `files` and `setup`, and judge its end by the "
        "row's `check` command; see docs/tools.md.",
    )
    forks: bool = meaning(
        False,
        "Rows hold the beginning of their conversation in the column `fork`, as the command fork "
        "writes them; see docs/forks.md.",
    )
    command_memory_mb: PositiveInt = meaning(
        2048, "Memory of a conversation's commands: of each process, and of all together, in MB."
    )
    max_processes: PositiveInt = meaning(
        512, "Processes that the commands of a conversation may have at a time."
    )
    workspace_mb: PositiveInt = meaning(
        4096, "Size of a workspace, in MB; a command that makes it larger is stopped."
    )
    network: bool = meaning(False, "Let commands in the sandbox use the network.")
    web_search_provider: Literal["ddgs", "tavily", "brave"] = meaning(
        "ddgs",
        "Who answers web_search: ddgs (no key), tavily (TAVILY_API_KEY), brave (BRAVE_API_KEY).",
    )
    web_search_url: str | None = _running(
        None, "Where the search provider is asked, if not at its own address."
    )
    web_allow: Names = _running(
        (),
        "What web_fetch and the browser may reach beside public addresses, separated by commas: "
        "HOST, HOST:PORT or NETWORK/BITS.",
    )
    temperature: float | None = meaning(
        None, "Sampling temperature; unset sends none.", ge=0, allow_inf_nan=False
    )
    top_p: float | None = meaning(None, "Nucleus sampling bound; unset sends none.", gt=0, le=1)
    max_tokens: PositiveInt | None = meaning(
        None, "Bound on tokens per reply; unset sends none (16,000 for Anthropic)."
    )
    extra_body: Annotated[ExtraBody, BeforeValidator(parse_json)] = meaning(
        None, "JSON object merged into every request body, for options of one provider."
    )
    reasoning_effort: Effort | None = meaning(
        None, "How much the model is to reason; unset leaves it to the endpoint."
    )
    reasoning_disabled: bool = meaning(
        False, "The same as --reasoning_effort=none, and wins over it."
    )
    blank_reasoning: bool = meaning(
        False, "OpenAI dialect: send a blank reasoning_content where a reply had none."
    )
    prompt_caching: bool = _running(
        True, "Anthropic: keep the system message and the tools in the prompt cache."
    )
    script_file: Path | None = meaning(
        None, "YAML file with the turns that --model scripted plays for rows without a script."
    )
    prefill_messages_file: Path | None = _running(
        None, "JSON file with `prefill_messages`; they count by their content."
    )
    require_reasoning: bool = _running(
        False, "Leave completed conversations without any reasoning out of the training file."
    )
    require_passed: bool = _running(
        False,
        "Leave conversations that did not pass their check out of the training file; those without "
        "a check stay.",
    )
    accept_rows: AcceptedRows = _running(
        (),
        "Training file: keep rows that are refused for these reasons, as rejects.jsonl calls "
        "them: unknown_tool, arguments_not_json, arguments_not_object, control_token.",
    )
    empty_think: Literal["keep", "omit"] = _running(
        "keep",
        "Training file: whether turns without reasoning open with an empty <think> block, as the "
        "Hermes dialect has it; `omit` is for models that do not reason.",
    )
    seed: Seed = meaning(0, "Seed of everything that is drawn at random.")
    num_samples: int = _running(1, "Independent conversations per prompt.", ge=1, le=1_000_000)
    max_samples: PositiveInt | None = _running(None, "Use only the first N valid rows.")
    shard: Annotated[str | None, AfterValidator(plain_shard)] = _running(
        None,
        "Only part i of n of the dataset, as i/n with i from 0 to n-1, by a hash of prompt ids: "
        "$SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT (--array=0-7) or $JOB_COMPLETION_INDEX/8. "
        "Each shard needs its own --run_name; `merge` makes one run of all.",
    )
    on_bad_row: Literal["skip", "fail"] = _running(
        "skip", "What a bad row does: skip it (named and counted), or fail before any model call."
    )
    batch_size: PositiveInt = _running(20, "Prompts dealt to a worker at a time, at most.")
    num_workers: PositiveInt = _running(4, "Worker processes.", le=1024)
    executor: Literal["local", "ray"] = _running(
        "local", "Where workers run: on this machine, or as Ray actors (extra `ray`)."
    )
    ray_address: str | None = _running(
        None,
        "Ray cluster to join, such as auto or HOST:PORT; default: RAY_ADDRESS, else one is "
        "started on this machine.",
        min_length=1,
    )
    worker_resources: Annotated[dict[str, Resource], BeforeValidator(parse_resources)] = _running(
        {"num_cpus": 1.0},
        "What a worker needs of a Ray node, such as num_cpus=1,memory=4e9 (bytes), or resources of "
        "your own.",
    )
    ray_storage: Literal["driver", "shared"] = _running(
        "driver",
        "Where workers of a Ray cluster keep journals and workspaces: journals with the driver and "
        "workspaces on their node, or both in the run directory, on storage that all nodes share.",
    )
    ray_scratch_dir: Path | None = _running(
        None, "Where Ray nodes keep workspaces; default: their directory for temporary files."
    )
    concurrency: PositiveInt | None = _running(
        None, "Conversations in flight per worker; default: --batch_size."
    )
    max_run_cost_usd: PositiveFloat | None = _running(
        None,
        "Dollars that the run may spend, over all starts; it stops before a call that could "
        "exceed them (exit 3). Needs --max_tokens.",
    )
    max_run_tokens: PositiveInt | None = _running(None, "The same in tokens, read and written.")
    max_in_flight: PositiveInt | None = _running(
        None, "Model calls in flight at one endpoint; default: as many as conversations."
    )
    rpm: PositiveFloat | None = _running(None, "Requests per minute to one endpoint.")
    tpm: PositiveFloat | None = _running(None, "Tokens per minute, read and written, likewise.")
    start_in_flight: PositiveInt = _running(
        64,
        "Calls in flight to begin with; more follow while the endpoint keeps up, fewer when it "
        "refuses some (429).",
    )
    batch_api: bool = _running(
        False,
        "Ask by the provider's batches (OpenAI, Anthropic): about half the price, replies within "
        "a day; see docs/batches.md.",
    )
    batch_wait_s: PositiveFloat = _running(
        60.0, "Longest time that calls are gathered for one batch, in seconds."
    )
    batch_max_requests: PositiveInt = _running(
        50_000, "Most calls in one batch; the provider's own bounds hold besides."
    )
    batch_live_share: float = _running(
        0.95,
        "Once this share of the tasks has ended, further calls are made live; 1 for never.",
        ge=0,
        le=1,
    )
    max_attempts: PositiveInt = _running(
        3, "Attempts per conversation, over all starts, before it counts as failed for good."
    )
    command_timeout_s: PositiveFloat = meaning(120.0, "Deadline of one command, in seconds.")
    tool_timeout_s: PositiveFloat = meaning(300.0, "Deadline of one tool call, in seconds.")
    attempt_timeout_s: PositiveFloat = _running(
        600.0, "Deadline of one attempt of a model call, in seconds."
    )
    idle_timeout_s: PositiveFloat = _running(
        120.0, "Longest silence between two parts of a streamed reply, in seconds."
    )
    stream_replies: bool = _running(
        False,
        "Have replies sent in parts: for long ones through proxies that cut silent connections. "
        "Costs more CPU per call.",
    )
    call_attempts: PositiveInt = _running(
        8, "Attempts of one model call; rate limits do not count."
    )
    call_timeout_s: PositiveFloat = _running(
        3600.0,
        "How long after its beginning a model call is tried once more, in seconds; a running "
        "attempt has its own deadline.",
    )
    grace_s: float = _running(
        30.0,
        "After Ctrl-C or SIGTERM, seconds that running turns get to finish.",
        ge=0,
        allow_inf_nan=False,
    )
    heartbeat_timeout_s: float = _running(
        60.0,
        "A worker that is silent for this long is killed and replaced.",
        ge=5,
        allow_inf_nan=False,
    )
    log_level: Literal["debug", "info", "warning", "error"] = _running("info", "Detail of run.log.")

    @model_validator(mode="after")
    def _selects_once(self) -> RunConfig:
        if self.models is not None and self.model != _DEFAULT_MODEL:
            msg = "model and models both say what to ask; give one"
            raise ValueError(msg)
        if self.models is not None and not any(self.models.values()):
            msg = "models: some weight must be above 0"
            raise ValueError(msg)
        if self.models is not None and SCRIPTED in self.models and len(self.models) > 1:
            msg = "models: scripted cannot be one of several"
            raise ValueError(msg)
        if bad := [name for name in self.endpoints if not name.isidentifier()]:
            msg = f"endpoints: {bad[0]!r}: a name is letters, digits and '_'"
            raise ValueError(msg)
        if taken := [name for name in self.endpoints if name in (*ENDPOINTS, SCRIPTED)]:
            msg = f"endpoints: {taken[0]!r} is the name of a known one; choose another"
            raise ValueError(msg)
        if self.distribution is not None and self.enabled_toolsets is not None:
            msg = "distribution and enabled_toolsets both say which toolsets to offer; give one"
            raise ValueError(msg)
        return self

    @property
    def agent_options(self) -> AgentOptions:
        """The options of conversations alone."""
        return AgentOptions.model_construct(
            **{name: getattr(self, name) for name in AgentOptions.model_fields}
        )

    def model_weights(self) -> dict[str, float]:
        """The models that conversations ask, with their weights."""
        return self.models or {self.model: 1.0}

    def toolset_percentages(self) -> Distribution | None:
        """The distribution of toolsets; None where all conversations are offered the same."""
        if self.distribution is None:
            return None
        return _load_distribution(self.distribution, self.tools, tuple(self.mcp or ()))

    def selected_toolsets(self) -> tuple[str, ...] | None:
        """The toolsets that any conversation can be offered; None means all."""
        drawn = self.toolset_percentages()
        return self.enabled_toolsets if drawn is None else tuple(sorted(drawn))

    def web_settings(self) -> WebSettings:
        """What the web tools work with. Raises `ValueError`."""
        return WebSettings(
            cache_dir=self.run_dir / "web_cache",
            provider=self.web_search_provider,
            search_url=self.web_search_url,
            allow=self.web_allow,
        )

    def row_rules(
        self, api: str, *, is_priced: bool = True, toolsets: Collection[str] | None = None
    ) -> RowRules:
        """How the rows of the dataset are read, for a model of this API."""
        return RowRules(
            self.system_prompt,
            self.agent_options,
            script_use(api, has_script_file=self.script_file is not None),
            is_priced,
            None if toolsets is None else frozenset(toolsets),
            None if self.models is None else frozenset(self.models),
            self.row_setup,
            self._image_use(),
            self.forks,
        )

    @property
    def agents_per_worker(self) -> int:
        """Conversations in flight per worker."""
        return self.concurrency or self.batch_size

    def model_prefixes(self) -> set[str]:
        """What stands before the colon in the names of all models."""
        asked = [*self.model_weights(), *(agent.model or "" for agent in self.subagents)]
        return {name.partition(":")[0] for name in asked}

    def _image_use(self) -> ColumnUse:
        if self.sandbox != "docker":
            return "ignored"
        return "needed" if self.docker_image is None else "allowed"

    @property
    def conversations(self) -> int:
        """Conversations in flight in the whole run."""
        return self.num_workers * self.agents_per_worker

    @property
    def run_dir(self) -> Path:
        """The directory of this run."""
        return self.output_dir / self.run_name

    def to_json(self) -> dict[str, Any]:
        """All fields, for run.json; of what is for no file (a prompt, keys) only its digest."""
        fields = self.model_dump(mode="json")
        if self.ephemeral_system_prompt is not None:
            fields["ephemeral_system_prompt"] = _hidden(self.ephemeral_system_prompt)
        for server in (fields["mcp"] or {}).values():
            server["env"] = {name: _hidden(text) for name, text in server["env"].items()}
        return fields


@lru_cache(maxsize=8)
def _load_distribution(
    name: str, tools: tuple[str, ...] | None, servers: tuple[str, ...]
) -> Distribution:
    """Asked once per task; the import would slow down whoever only wants help."""
    from toolsets.catalog.custom import load_own
    from toolsets.catalog.distributions import load_distribution
    from toolsets.catalog.lookup import catalog
    from toolsets.catalog.registry import Toolset

    added = (*load_own(tools or ()), *(Toolset(server, "", ()) for server in servers))
    return load_distribution(name, known=catalog(added))


def _hidden(text: str) -> str:
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"
