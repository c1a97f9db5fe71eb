"""The config of a run: every option once, with its type, default and help.

Flags and YAML files are read into a `RunConfig`; flags win. Fields declared with `meaning` affect
the data and are part of the fingerprint (`config/fingerprint.py`); all others may change
from start to start.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, model_validator

from agent.models.providers import RESERVED_PREFIXES, Api
from agent.models.resolve import SCRIPTED, normalize_prefix
from agent.options import (
    AgentOptions,
    Float,
    Int,
    PositiveFloat,
    PositiveInt,
    Seed,
    meaning,
    parse_json,
)
from batch_trajectories.basics.errors import ConfigError
from batch_trajectories.basics.validation import bucket_url
from batch_trajectories.config.endpoints import BaseUrl, Effort, ExtraBody, PriceConfig
from batch_trajectories.config.option_types import (
    AcceptedRows,
    Endpoints,
    LocalPath,
    McpServers,
    Names,
    OwnAgent,
    Place,
    Registry,
    Resource,
    StopIf,
    Weight,
    is_text,
    parse_columns,
    parse_resources,
    plain_name,
    running,
    url_or_absolute_path,
)
from batch_trajectories.dataset.shards import plain_shard
from toolsets.sandbox import SANDBOXES, Engine, Pull

if TYPE_CHECKING:
    from batch_trajectories.dataset.row import ColumnUse, RowRules
    from toolsets.catalog.distributions import Distribution
    from toolsets.net.web_settings import WebSettings
    from toolsets.sandbox.base import SandboxSettings


class RunConfig(AgentOptions):
    """The config of a run: the options of its conversations and its own."""

    if TYPE_CHECKING:
        # Options may be given as in a config file (a path as text, a tuple as a list), which is
        # more than their fields hold.
        def __init__(self, *, dataset_file: str | Path, run_name: str, **options: Any) -> None: ...

    # Where commands run, what they work on, and how it is judged.

    sandbox: str = meaning(
        "bwrap",
        "Sandbox in which commands run (docs/tools.md). local does NOT isolate them.",
    )
    docker_image: str | None = meaning(
        None,
        "Image for rows without one. Unless --workspace=image is given, it must contain python3.",
    )
    workspace: Literal["directory", "image"] = meaning(
        "directory",
        "Work in an empty directory, or in a directory of each row's image.",
    )
    workdir: str | None = meaning(
        None,
        "With --workspace=image: the workspace of rows without `workdir`. Default: the working "
        "directory of the image.",
    )
    images: Place | None = running(
        None,
        "Directory with images (OCI layouts, archives of `docker save`), or its URL (s3, gs, az). "
        "For --sandbox=bwrap --workspace=image.",
    )
    container_engine: Engine = running(
        "docker", "Program that runs the containers of --sandbox=docker."
    )
    container_runtime: str | None = running(
        None,
        "OCI runtime of these containers, such as runsc (gVisor). Default: that of the engine.",
    )
    pull: Pull = running(
        "never",
        "Whether to pull images that are not here, into the engine of --sandbox=docker, or from "
        "their registries into --images.",
    )
    registry: Registry = running(
        None,
        "Mirrors of registries, and limits, for pulls into --images, {mirrors: {HOST: URL}, "
        "parallel: N, max_gb: N} (docs/images.md).",
    )
    row_setup: bool = meaning(
        False,
        "Use each row's columns `files`, `setup`, `cwd` and `check`.",
    )
    check_in: Literal["same", "fresh"] = meaning(
        "same",
        "Where checks run. same: the workspace as the model left it; fresh: a new copy of the "
        "image, with the model's changes applied.",
    )
    check_network: bool = meaning(
        False,
        "Give checks network access if their rows ask for it.",
    )
    env_from: Names = meaning(
        (),
        "Environment variables of this machine that rows may use in `env`, as ${NAME}.",
    )
    keep_workspaces: PositiveInt | None = running(
        None,
        "Keep workspaces of up to N MB, so that `check` can judge them again.",
    )
    audit: bool = meaning(False, "A run of `check_tasks`: steps in place of conversations.")
    checked_run: LocalPath | None = running(
        None, "A run of `check`: the directory of the run whose conversations are judged."
    )
    only_sound: str | None = running(
        None,
        "Use only the rows that an audit (`check_tasks`) found sound. Give its name or directory.",
        min_length=1,
    )
    reward: Names = running(
        (),
        "Functions that give rewards: MODULE:FUNCTION or FILE.py:FUNCTION (docs/rewards.md).",
    )
    reward_timeout_s: PositiveFloat = running(60.0, "Time limit of a reward function.")
    command_memory_mb: PositiveInt = meaning(
        2048, "Memory limit of a conversation's commands, per process and in total."
    )
    max_processes: PositiveInt = meaning(512, "Process limit of a conversation's commands.")
    workspace_mb: PositiveInt = meaning(4096, "Size limit of a workspace.")
    network: bool = meaning(False, "Give sandboxed commands network access.")

    # How many conversations a prompt gets, and from which models.

    models: Annotated[dict[str, Weight] | tuple[str, ...] | None, BeforeValidator(parse_json)] = (
        meaning(
            None,
            "Several models with weights, {NAME: WEIGHT}: each conversation draws one. With "
            "--escalate_after, a list of names.",
            min_length=1,
        )
    )
    escalate_after: PositiveInt | None = meaning(
        None,
        "Give a prompt to the next model of the list --models after N samples that did not pass "
        "(docs/stopping.md).",
    )
    model_budgets: Annotated[dict[str, PositiveFloat] | None, BeforeValidator(parse_json)] = (
        running(
            None,
            "Budgets of the models of --escalate_after in dollars, {NAME: USD}. A model that has "
            "spent its budget begins no further conversation (docs/stopping.md).",
            min_length=1,
        )
    )
    num_samples: Int = running(1, "Conversations per prompt.", ge=1, le=1_000_000)
    until_passed: PositiveInt | None = running(
        None,
        "Run samples of a prompt until N have passed, at most --num_samples. Not for GRPO "
        "(docs/stopping.md).",
    )
    also_failed: Int = running(
        0, "With --until_passed: also run until N have not passed, for pairs.", ge=0
    )

    # The dataset, the run and its limits.

    dataset_file: Place = running(
        ...,
        "Prompts: a file (JSONL, JSON, CSV, TSV or Parquet, also .gz or .zst), a directory of such "
        "files or of `save_to_disk`, a URL (s3, gs, az), or "
        "hf:ORG/NAME[/CONFIG][:SPLIT][@REVISION].",
    )
    columns: Annotated[dict[str, str], BeforeValidator(parse_columns)] = running(
        {},
        "Read columns of other names, such as prompt=problem,expected=answer.",
    )
    rows: str | None = running(
        None,
        "Kind of rows: a preset such as swe-bench, or the path of a rows file (docs/data.md).",
        min_length=1,
    )
    run_name: Annotated[str, AfterValidator(plain_name)] = running(
        ..., "Name of the run. The same name resumes it."
    )
    output_dir: LocalPath = running(Path("trajectories"), "Directory for runs and training files.")
    mirror: Annotated[str, AfterValidator(bucket_url)] | None = running(
        None, "Keep a copy of the run at this URL (s3, gs, az or file; docs/scale.md)."
    )
    model: str = meaning(
        "",
        "openai:NAME, anthropic:NAME, responses:NAME, openrouter:NAME, scripted, or a NAME at"
        " --base_url.",
    )
    endpoints: Endpoints = running(
        {},
        "Your own endpoints, {NAME: {base_url, api, key_env, ...}} (docs/endpoints.md). Their "
        "models are called NAME:MODEL.",
    )
    # Not part of the fingerprint: the price of a reply does not change the reply.
    prices: Annotated[dict[str, PriceConfig], BeforeValidator(parse_json)] = running(
        {},
        "Your prices in dollars per million tokens, {MODEL: {input, output, cache_read, "
        "cache_write}}.",
    )
    base_url: BaseUrl | None = running(
        None, "Root URL of the endpoint. Default: that of the provider."
    )
    api: Api | None = meaning(
        None, "API of the endpoint (docs/endpoints.md). Default: that of the provider."
    )
    key_env: str | None = running(
        None,
        "Environment variable that holds the API key. 'none': send no key.",
        min_length=1,
    )
    agent: OwnAgent = meaning(
        None,
        "Your own agent, which runs as a command. Give a preset such as claude-code, a YAML file, "
        "or JSON (docs/agents.md).",
    )
    system_prompt: str | None = meaning(None, "System prompt for rows without one.")
    enabled_toolsets: Names | None = meaning(
        None,
        "Toolsets to offer. Default: all except browser and web. 'none': no tools.",
    )
    disabled_toolsets: Names = meaning((), "Toolsets never to offer.")
    tools: Names | None = meaning(
        None,
        "Your own tools: MODULE:ATTRIBUTE, FILE.py:ATTRIBUTE or an entry point.",
    )
    mcp: McpServers = meaning(
        None,
        "MCP servers, {NAME: {command or url, ...}}, or a file such as .mcp.json. Each server is a "
        "toolset.",
    )
    distribution: str | None = meaning(
        None,
        "Each conversation draws its toolsets from this distribution (a name or a YAML file).",
    )
    forks: bool = meaning(False, "Rows continue conversations (column `fork`).")
    web_search_provider: Literal["ddgs", "tavily", "brave"] = meaning(
        "ddgs",
        "Search provider. tavily and brave need a key.",
    )
    web_allow: Names = running(
        (),
        "Non-public addresses that the web tools and the browser may reach: HOST, HOST:PORT or "
        "NETWORK/BITS.",
    )
    temperature: Float | None = meaning(None, "Sampling temperature.", ge=0, allow_inf_nan=False)
    top_p: Float | None = meaning(None, "Nucleus sampling threshold.", gt=0, le=1)
    max_tokens: PositiveInt | None = meaning(
        None, "Maximum tokens per reply (for Anthropic, 16,000 if you give none)."
    )
    extra_body: Annotated[ExtraBody, BeforeValidator(parse_json)] = meaning(
        None, "Fields to add to the body of every request."
    )
    reasoning_effort: Effort | None = meaning(None, "Reasoning effort. none: no reasoning.")
    token_ids: bool = meaning(
        False,
        "Ask for the sampled token ids and logprobs, for `export --format rl` (vLLM, SGLang).",
    )
    prompt_caching: bool = running(
        True, "Anthropic: cache the system message, the tools and the history."
    )
    script_file: LocalPath | None = meaning(
        None, "YAML file with the turns of --model=scripted, for rows without a script."
    )
    require_reasoning: bool = running(
        False, "Training file: leave out conversations without reasoning."
    )
    require_passed: bool = running(
        False, "Training file: leave out conversations that did not pass."
    )
    accept_rows: AcceptedRows = running(
        (), "Training file: keep rows with these flaws (docs/export.md)."
    )
    empty_think: Literal["keep", "omit"] = running(
        "keep",
        "Training file: keep or omit the empty <think> block of turns without reasoning.",
    )
    seed: Seed = meaning(0, "Seed of all random choices.")
    max_samples: PositiveInt | None = running(None, "Use only the first N usable rows.")
    shard: Annotated[str | None, AfterValidator(plain_shard)] = running(
        None,
        "Run only part i of n of the dataset: i/n, with i from 0 to n-1.",
    )
    on_bad_row: Literal["skip", "fail"] = running(
        "skip", "Bad rows. skip: discard and report them; fail: refuse to start."
    )
    batch_size: PositiveInt = running(20, "Maximum tasks assigned to a worker at a time.")
    num_workers: PositiveInt = running(4, "Worker processes.", le=1024)
    executor: Literal["local", "ray"] = running(
        "local", "Run workers on this machine or as Ray actors."
    )
    ray_address: str | None = running(
        None,
        "Cluster to join: auto or HOST:PORT. Default: RAY_ADDRESS, or else a new cluster.",
        min_length=1,
    )
    worker_resources: Annotated[dict[str, Resource], BeforeValidator(parse_resources)] = running(
        {"num_cpus": 1.0},
        "Resources per Ray worker: num_cpus, memory (bytes), or your own.",
    )
    ray_storage: Literal["driver", "shared"] = running(
        "driver",
        "driver: journals are with the driver, workspaces on the nodes. shared: both are on shared "
        "storage.",
    )
    concurrency: PositiveInt | None = running(
        None, "Conversations in flight per worker. Default: --batch_size."
    )
    max_run_cost_usd: PositiveFloat | None = running(
        None,
        "Budget of the run in dollars, over all starts. Needs --max_tokens.",
    )
    max_run_tokens: PositiveInt | None = running(
        None, "Budget of the run in tokens, over all starts. Needs --max_tokens."
    )
    stop_if: StopIf = running(
        (),
        "Stop a hopeless run (exit 7), such as no_pass:30, no_call:30, failed:50%, rejected:90% or "
        "same_ending:90%. none: do not even warn (docs/stopping.md).",
    )
    max_in_flight: PositiveInt | None = running(None, "Maximum model calls in flight per endpoint.")
    rpm: PositiveFloat | None = running(None, "Maximum requests per minute per endpoint.")
    tpm: PositiveFloat | None = running(None, "Maximum tokens per minute per endpoint.")
    shared_limits: Annotated[str, AfterValidator(url_or_absolute_path)] | None = running(
        None,
        "Share rpm, tpm and budgets with other runs, in this directory or URL (docs/scale.md).",
    )
    start_in_flight: PositiveInt = running(
        64, "Calls in flight at the beginning. The limit then adapts to the endpoint."
    )
    batch_api: bool = running(
        False,
        "Use the provider's Batch API. It costs about half, and replies take up to a day.",
    )
    batch_wait_s: PositiveFloat = running(60.0, "Maximum time to collect calls for a batch.")
    batch_max_requests: PositiveInt = running(50_000, "Maximum calls per batch.")
    max_attempts: PositiveInt = running(3, "Attempts per conversation over all starts.")
    command_timeout_s: PositiveFloat = meaning(120.0, "Timeout of a command.")
    tool_timeout_s: PositiveFloat = meaning(300.0, "Timeout of a tool call.")
    max_rebuild_s: Float = running(
        300.0,
        "Maximum time to rebuild a workspace after a crash. 0: never rebuild.",
        ge=0,
        allow_inf_nan=False,
    )
    attempt_timeout_s: PositiveFloat = running(600.0, "Timeout of one attempt of a model call.")
    idle_timeout_s: PositiveFloat = running(120.0, "Maximum time without data in a streamed reply.")
    stream_replies: bool = running(
        False, "Stream replies, for proxies that cut silent connections."
    )
    call_attempts: PositiveInt = running(
        8, "Attempts per model call. Refusals by rate limits do not count."
    )
    call_timeout_s: PositiveFloat = running(
        3600.0, "Time after which a model call is not tried again."
    )
    grace_s: Float = running(
        30.0,
        "Time that running turns have to finish after Ctrl-C or SIGTERM.",
        ge=0,
        allow_inf_nan=False,
    )
    heartbeat_timeout_s: Float = running(
        60.0,
        "Replace a worker that has not reported for this time.",
        ge=5,
        allow_inf_nan=False,
    )
    log_level: Literal["debug", "info", "warning", "error"] = running(
        "info", "Least level of the lines of run.log."
    )

    @model_validator(mode="after")
    def _check_image_options(self) -> Self:
        if not self.is_inside:
            if self.images is not None or self.workdir is not None:
                name = "workdir" if self.images is None else "images"
                raise ValueError(f"{name}: needs --workspace=image")
            return self
        if self.workdir is not None and not self.workdir.startswith("/"):
            raise ValueError("workdir: must be an absolute path")
        return self

    def sandbox_settings(self, image: str | None = None) -> SandboxSettings:
        """The settings of sandboxes; `image` is that of a row, in place of the run's."""
        from toolsets.sandbox.base import SandboxSettings  # --help does without sandboxes

        return SandboxSettings(
            image=image or self.docker_image,
            engine=self.container_engine,
            runtime=self.container_runtime,
            images=self.images,
            pull=self.pull,
            registry=self.registry,
        )

    @property
    def is_inside(self) -> bool:
        """Whether the workspace is a directory of an image."""
        return self.workspace == "image"

    @property
    def pulls_images(self) -> bool:
        """Whether missing images are fetched from their registries into `images`."""
        return self.is_inside and self.sandbox == "bwrap" and self.pull == "missing"

    @property
    def uses_images(self) -> bool:
        """Whether commands run in container images, whose programs are not this machine's.

        Raises `ConfigError` for a sandbox that is not installed here, as of a stored run.
        """
        if self.is_inside:
            return True
        if self.sandbox in SANDBOXES:
            return SANDBOXES[self.sandbox].needs_image
        from toolsets.sandbox.base import SandboxError  # as above
        from toolsets.sandbox.factory import find_sandbox_class

        try:
            return find_sandbox_class(self.sandbox).needs_image
        except SandboxError as error:
            raise ConfigError(str(error)) from error

    @model_validator(mode="after")
    def _check_samples(self) -> Self:
        """Check options of samples that depend on each other; set the defaults of a cascade."""
        is_list = isinstance(self.models, tuple)
        if is_list != (self.escalate_after is not None):
            raise ValueError(
                "models: a list of models is a cascade, which needs escalate_after; to draw one "
                "for each conversation, give {NAME: WEIGHT}"
                if is_list
                else "escalate_after: needs models: [SMALL, ..., LARGE], a list in this order"
            )
        if self.models is not None and self.escalate_after is not None:
            if len(set(self.models)) != len(self.models):
                raise ValueError("models: a model of a cascade is named twice")
            samples = self.escalate_after * len(self.models)
            if "num_samples" not in self.model_fields_set:
                self.__dict__.update(num_samples=samples)
            if self.until_passed is None:
                self.__dict__.update(until_passed=1)
            if (reached := -(-self.num_samples // self.escalate_after)) < len(self.models):
                raise ValueError(
                    f"num_samples: {self.num_samples} samples reach only {reached} of "
                    f"{len(self.models)} models; with escalate_after: {self.escalate_after} give "
                    f"{samples} or more"
                )
        if strange := [
            name for name in self.model_budgets or () if name not in (self.models or ())
        ]:
            raise ValueError(f"model_budgets: {strange[0]!r} is no model of escalate_after")
        if self.model_budgets is not None and self.escalate_after is None:
            raise ValueError("model_budgets: needs escalate_after; see max_run_cost_usd")
        if self.also_failed and self.until_passed is None:
            raise ValueError("also_failed: needs until_passed")
        if (least := (self.until_passed or 0) + self.also_failed) > self.num_samples:
            raise ValueError(
                f"until_passed: --num_samples={self.num_samples} is the maximum per prompt; give "
                f"{least} or more"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _add_row_options(cls, values: Any) -> Any:
        """Add the options that the rows file sets, unless they are given."""
        name = values.get("rows") if isinstance(values, dict) else None
        if not isinstance(name, str) or not name:
            return values
        from batch_trajectories.dataset.rows_file import OPTIONS, load_rows_file

        if values.keys() >= {*OPTIONS}:
            return values  # a stored config, whose rows file may be gone
        return {**load_rows_file(name).options, **values}

    @model_validator(mode="before")
    @classmethod
    def _add_agent_defaults(cls, values: Any) -> Any:
        if not isinstance(values, dict) or values.get("agent") is None:
            return values
        from batch_trajectories.config.agents import DEFAULTS

        return {**DEFAULTS, **values}

    @model_validator(mode="after")
    def _normalize_model_names(self) -> RunConfig:
        """Write `openai/NAME` as `openai:NAME`, for the fingerprint, prices and rows."""
        if self.base_url is None:
            endpoints, models = self.endpoints, self.models
            if isinstance(models, dict):
                models = {normalize_prefix(name, endpoints): models[name] for name in models}
            elif models:
                models = tuple(normalize_prefix(name, endpoints) for name in models)
            self.__dict__.update(
                model=normalize_prefix(self.model, endpoints),
                models=models,
                prices={
                    normalize_prefix(name, endpoints): price for name, price in self.prices.items()
                },
            )
        return self

    @model_validator(mode="after")
    def _check_agent_options(self) -> RunConfig:
        if self.agent is not None:
            from batch_trajectories.config.agents import check_options, check_user

            given = {
                name
                for name, field in type(self).model_fields.items()
                if getattr(self, name) != field.get_default(call_default_factory=True)
            }
            check_options(self.agent, given - ({"docker_image"} if self.uses_images else set()))
            if self.simulated_user is not None:
                check_user(self.agent, self.simulated_user)
        return self

    @model_validator(mode="before")
    @classmethod
    def _check_text(cls, values: Any) -> Any:
        for key, value in values.items() if isinstance(values, dict) else ():
            if not is_text(value):
                raise ValueError(
                    f"{key}: half of a surrogate pair (\\ud800 to \\udfff) is not text"
                )
        return values

    @model_validator(mode="after")
    def _check_selections(self) -> RunConfig:
        if self.models is not None and self.model:
            raise ValueError("model and models both name the model; give one of them")
        if isinstance(self.models, dict) and not any(self.models.values()):
            raise ValueError("models: at least one weight must be above 0")
        if self.models is not None and SCRIPTED in self.models and len(self.models) > 1:
            raise ValueError("models: scripted cannot be combined with other models")
        if bad := [name for name in self.endpoints if not name.isidentifier()]:
            raise ValueError(f"endpoints: {bad[0]!r}: a name may only have letters, digits and '_'")
        if taken := [name for name in self.endpoints if name in (*RESERVED_PREFIXES, SCRIPTED)]:
            raise ValueError(
                f"endpoints: {taken[0]!r} is the name of a built-in endpoint; choose another"
            )
        if self.distribution is not None and self.enabled_toolsets is not None:
            raise ValueError(
                "distribution and enabled_toolsets both select toolsets; give one of them"
            )
        return self

    @property
    def agent_options(self) -> AgentOptions:
        """The options of conversations alone."""
        return AgentOptions.model_construct(
            **{name: getattr(self, name) for name in AgentOptions.model_fields}
        )

    def model_weights(self) -> dict[str, float]:
        """The models that conversations call, with their weights."""
        if isinstance(self.models, tuple):
            return dict.fromkeys(self.models, 1.0)
        return self.models or {self.model: 1.0}

    def toolset_percentages(self) -> Distribution | None:
        """The distribution of toolsets; None if all conversations are offered the same."""
        if self.distribution is None:
            return None
        return _load_distribution(self.distribution, self.tools, tuple(self.mcp or ()))

    def selected_toolsets(self) -> tuple[str, ...] | None:
        """The toolsets that a conversation can be offered; None for all."""
        if self.agent is not None:
            return ("none",)  # it has its own tools
        drawn = self.toolset_percentages()
        return self.enabled_toolsets if drawn is None else tuple(sorted(drawn))

    def web_settings(self) -> WebSettings:
        """The settings of the web tools. Raises `ValueError`."""
        from toolsets.net.web_settings import WebSettings

        return WebSettings(
            cache_dir=self.run_dir / "web_cache",
            provider=self.web_search_provider,
            search_url=os.environ.get(f"{self.web_search_provider.upper()}_SEARCH_URL") or None,
            allow=self.web_allow,
        )

    def row_rules(
        self,
        api: str,
        *,
        is_priced: bool = True,
        toolsets: Collection[str] | None = None,
        user_toolsets: Collection[str] | None = None,
    ) -> RowRules:
        """The rules to read the rows of the dataset, for a model of this API."""
        from batch_trajectories.dataset.row import RowRules  # --help reads no rows

        return RowRules(
            system_prompt=self.system_prompt,
            options=self.agent_options,
            script=self._script_use(api),
            is_priced=is_priced,
            toolsets=None if toolsets is None else frozenset(toolsets),
            user_toolsets=None if user_toolsets is None else frozenset(user_toolsets),
            models=frozenset(self.models) if isinstance(self.models, dict) else None,
            with_setup=self.row_setup,
            image=self._image_use(),
            with_forks=self.forks,
            agent=self.agent,
            inside=self.is_inside,
            network=self.network,
            check_in=self.check_in,
            check_network=self.check_network,
            variables=frozenset(self.env_from),
            is_audit=self.audit,
        )

    @property
    def agents_per_worker(self) -> int:
        """Conversations in flight per worker."""
        return self.concurrency or self.batch_size

    def model_prefixes(self) -> set[str]:
        """The prefixes of all model names, before the colon."""
        user = () if self.simulated_user is None else (self.simulated_user,)
        agent_models = (agent.model or "" for agent in (*self.subagents, *user))
        names = [*self.model_weights(), *agent_models]
        return {name.partition(":")[0] for name in names}

    def _script_use(self, api: str) -> ColumnUse:
        if api != SCRIPTED or self.audit:
            return "ignored"
        return "needed" if self.script_file is None else "allowed"

    def _image_use(self) -> ColumnUse:
        if not self.uses_images:
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
        """All fields, for run.json; secrets (ephemeral prompt, keys) only as digests."""
        fields = self.model_dump(mode="json")
        if self.ephemeral_system_prompt is not None:
            fields["ephemeral_system_prompt"] = _hide_text(self.ephemeral_system_prompt)
        for server in (fields["mcp"] or {}).values():
            for key in ("env", "headers"):
                server[key] = {name: _hide_text(text) for name, text in server[key].items()}
        return fields


@lru_cache(maxsize=8)
def _load_distribution(
    name: str, tools: tuple[str, ...] | None, servers: tuple[str, ...]
) -> Distribution:
    """Load a distribution. Cached because every task needs it; imports here keep `--help` fast."""
    from toolsets.catalog.custom import load_custom_toolsets
    from toolsets.catalog.distributions import load_distribution
    from toolsets.catalog.registry import Toolset, catalog

    added = (*load_custom_toolsets(tools or ()), *(Toolset(server, "", ()) for server in servers))
    return load_distribution(name, known=catalog(added))


def _hide_text(text: str) -> str:
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"
