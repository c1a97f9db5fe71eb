"""Plan a start: check everything before anything is written or paid for."""

from __future__ import annotations

import ipaddress
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import msgspec

from agent.messages.tokens import GRAMMAR, sampling_fields
from agent.models.model import ModelSettings, Price
from agent.models.providers import find_provider
from agent.models.resolve import SCRIPTED
from agent.models.scripted import ScriptedTurn, parse_script
from agent.setup import Setup, list_schemas
from batch_trajectories.basics.console import say
from batch_trajectories.basics.errors import ConfigError, DatasetError
from batch_trajectories.basics.text import plural
from batch_trajectories.config.models import Setups, called_models, set_up_models, unpriced_model
from batch_trajectories.config.run_config import RunConfig
from batch_trajectories.config.sandboxes import find_sandbox_problem, find_sandbox_warning
from batch_trajectories.config.toolsets import (
    build_catalog,
    find_unused_toolsets,
    list_mcp_tools,
)
from batch_trajectories.dataset.kept_dataset import (
    ROW_FILTER_KEY,
    DatasetSnapshot,
    RowFilter,
    take_snapshot,
)
from batch_trajectories.dataset.row import MODEL_COLUMN, RowRules
from batch_trajectories.dataset.row_conversation import TOOL_COLUMNS
from batch_trajectories.dataset.scan import CHATS_AS_TEXT, PROGRAMS, SETUP, UNUSED_TURNS, Scan
from batch_trajectories.dataset.scan_cache import cached_scan
from batch_trajectories.dataset.shards import parse_shard
from batch_trajectories.engine.executor_choice import check_executor
from batch_trajectories.engine.features import find_feature
from batch_trajectories.engine.file_systems import find_network_type
from batch_trajectories.engine.run_dir import (
    check_paths,
    prepare_directory,
    restore_first_defaults,
)
from batch_trajectories.engine.run_totals import stopping_rule
from batch_trajectories.records.checks import EXPECTED
from batch_trajectories.records.names import DATASET_INDEX, RUN_FILE
from toolsets.catalog.registry import collect_tools
from toolsets.sandbox.base import SandboxError
from toolsets.sandbox.cgroup import can_bound_memory, can_limit_cpus
from toolsets.sandbox.factory import find_sandbox_class

_MAX_LISTED_BAD_ROWS = 20


class Plan(msgspec.Struct, frozen=True):
    """A checked start that has not begun."""

    config: RunConfig
    setups: Setups
    sandbox: str | None
    """The name of the sandbox; None if no tool runs commands."""
    script: list[ScriptedTurn] | None
    dataset: DatasetSnapshot
    scan: Scan

    @property
    def api(self) -> str:
        """The dialect of the model; if there are several, of the first."""
        return next(iter(self.setups.values())).settings.api

    @property
    def toolsets(self) -> list[str]:
        """The names of the toolsets that conversations can be offered."""
        return next(iter(self.setups.values())).toolset_names()


def make_plan(
    config: RunConfig,
    *,
    writes: bool = True,
    fresh: bool = False,
    say: Callable[[str], object] = say,
) -> Plan:
    """Check all that can be checked before any model is called.

    Writes nothing but a dataset that is not JSONL, as JSONL; without `writes` not even that (see
    `take_snapshot`). Raises `ConfigError`, `DatasetError`, or what `take_snapshot` raises.
    """
    check_paths(config)
    if not fresh:
        config = restore_first_defaults(config)
    try:
        config = list_mcp_tools(config)
        if config.agent is not None:
            from batch_trajectories.engine.worker.agent_program import check_agent_program

            config = check_agent_program(config)
        known = build_catalog(config)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    check_executor(config)
    setups = set_up_models(config, known)
    first = next(iter(setups.values()))
    _check_web(config, first)
    needs_sandbox = _check_sandbox(config, first.sandboxed_toolsets())
    _check_variables(config)
    if config.reward:
        from batch_trajectories.engine.worker.reward_functions import (
            check_functions,  # most runs have none
        )

        check_functions(config.reward)
    script = _read_script(config.script_file)
    rules = config.row_rules(
        first.settings.api,
        is_priced=unpriced_model(setups) is None,
        toolsets=first.toolset_names(),
        user_toolsets=[toolset.name for toolset in first.user_toolsets],
    )
    if writes:
        prepare_directory(
            config, fresh=fresh
        )  # before a long read, and a copy that nothing would use
    dataset = _snapshot_dataset(config, rules, writes=writes, fresh=fresh, say=say)
    scan = _scan_dataset(config, dataset, rules)
    _refuse_unused_setup(config, scan, fresh=fresh)
    return Plan(
        config=config,
        setups=setups,
        sandbox=config.sandbox if needs_sandbox else None,
        script=script,
        dataset=dataset,
        scan=scan,
    )


def _check_sandbox(config: RunConfig, toolsets: Sequence[str]) -> bool:
    """Whether the run needs a sandbox; `toolsets` are those that do.

    Raises `ConfigError` if it needs one and none works here, or if the sandbox is unknown.
    """
    try:
        find_sandbox_class(config.sandbox)
    except SandboxError as error:
        raise ConfigError(str(error)) from error
    has_other_need = config.row_setup or config.is_inside or config.agent is not None
    if not toolsets and not has_other_need:
        return False
    if problem := _sandbox_problem(config):
        if config.is_inside or config.agent is not None:
            raise ConfigError(problem)
        raise ConfigError(_sandbox_refusal(problem, toolsets, config))
    return True


def _snapshot_dataset(
    config: RunConfig, rules: RowRules, *, writes: bool, fresh: bool, say: Callable[[str], object]
) -> DatasetSnapshot:
    """Take the snapshot of the dataset, and say how many of its tasks are sound, if known."""
    dataset = take_snapshot(
        config.dataset_file,
        config.run_dir,
        columns=config.columns,
        rows=config.rows,
        rules=rules,
        max_samples=config.max_samples,
        writes=writes,
        fresh=fresh,
        with_solutions=config.audit,
        only=_sound_rows(config),
        say=say,
    )
    if dataset.source is not None and (sound := dataset.source.get(ROW_FILTER_KEY)) is not None:
        reader: SoundRowsReader = find_feature("only_sound")
        say(reader.describe_sound(sound))
    return dataset


def _scan_dataset(config: RunConfig, dataset: DatasetSnapshot, rules: RowRules) -> Scan:
    try:
        return cached_scan(
            config.run_dir / DATASET_INDEX,
            dataset.path,
            max_samples=config.max_samples,
            rules=rules,
            num_samples=config.num_samples,
            shard=None if config.shard is None else parse_shard(config.shard),
        )
    except DatasetError as error:
        # The user knows the source, not the copy.
        reason = str(error).removeprefix(f"{dataset.path}: ")
        raise DatasetError(
            str(error) if dataset.source is None else f"{config.dataset_file}: {reason}"
        ) from error


def _count_columns(columns: Mapping[str, int]) -> str:
    """Name columns, each with how many rows have it."""
    return ", ".join(f"{name} ({plural(count, 'row')})" for name, count in columns.items())


def _refuse_unused_setup(config: RunConfig, scan: Scan, *, fresh: bool) -> None:
    """Raise `ConfigError` if rows set up or judge workspaces and nobody said whether to do so.

    Such columns mean nothing else, and a run without them is paid for and judged by nothing. A run
    that has begun without them goes on.
    """
    if config.row_setup or "row_setup" in config.model_fields_set:
        return
    if not fresh and (config.run_dir / RUN_FILE).exists():
        return
    columns = {name: scan.setup_columns[name] for name in SETUP if name in scan.setup_columns}
    if not columns:
        return
    named = _count_columns(columns)
    raise ConfigError(
        f"{config.dataset_file}: its rows set up or judge their workspace: {named}; add "
        "--row_setup to use these columns, which runs their commands in the sandbox, or "
        "--no_row_setup to leave them out (docs/tools.md)"
    )


class SoundRowsReader(Protocol):
    """Reads which rows of a dataset an audit found sound."""

    def read_sound_rows(self, config: RunConfig, /) -> RowFilter | None:
        """Return the filter of `--only_sound`. Raises `ConfigError`."""
        ...

    def describe_sound(self, told: Mapping[str, Any], /) -> str:
        """Return a sentence on the rows that were kept and left out, from the source's counts."""
        ...


def _sound_rows(config: RunConfig) -> RowFilter | None:
    if config.only_sound is None:
        return None
    reader: SoundRowsReader = find_feature("only_sound")
    return reader.read_sound_rows(config)


def _sandbox_problem(config: RunConfig) -> str | None:
    """The reason why the sandbox of a run does not work here."""
    for name, server in (config.mcp or {}).items() if config.is_inside else ():
        if server.mentions_workspace():
            from toolsets.mcp.mcp_settings import WORKSPACE

            return (
                f"mcp: {name}: {WORKSPACE} is a directory of this machine, which a workspace in "
                "an image is not"
            )
    return find_sandbox_problem(config)


def _check_variables(config: RunConfig) -> None:
    for name in config.env_from:
        if name not in os.environ:
            raise ConfigError(
                f"--env_from={name}: this variable is not set; set it, or leave the option out"
            )


def _sandbox_refusal(problem: str, toolsets: Sequence[str], config: RunConfig) -> str:
    names = ",".join(toolsets)
    msg = f"{problem.rstrip('.')}. "
    if toolsets:
        msg += f"The toolsets {names} run commands and need a sandbox. "
    if config.row_setup:
        msg += "The rows' `setup` and `check` are commands, too (--row_setup). "
    msg += "Or choose --sandbox local (commands then run with your rights, NOT isolated)"
    return msg + (f", or --disabled_toolsets {names}." if toolsets else ".")


def _check_web(config: RunConfig, setup: Setup) -> None:
    if not (setup.uses("web") or config.web_allow):
        return
    try:
        settings = config.web_settings()
        problem = settings.problem() if setup.uses("web") else None
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if problem:
        raise ConfigError(problem)


def describe(plan: Plan) -> str:
    """Describe the work of a start of `plan`, for `--dry_run`."""
    config, scan = plan.config, plan.scan
    first = next(iter(plan.setups.values()))
    names = [schema["function"]["name"] for schema in list_schemas(first, config.agent_options)]
    is_drawn = len(plan.setups) > 1 and config.escalate_after is None
    models = [
        _describe(setup.settings, weight if is_drawn else None)
        for setup, weight in zip(plan.setups.values(), config.model_weights().values(), strict=True)
    ]
    tools = f"toolsets   {_shares(plan) or 'none'} ({', '.join(names) or 'no tools'})"
    if (agent := config.agent) is not None:
        unknown = "of each image" if config.is_inside else "(version unknown)"
        tools = f"agent      {agent.name} {agent.found_version or unknown}"
    return "\n".join(
        [
            f"run        {config.run_dir}",
            f"dataset    {config.dataset_file}: {plural(scan.all_rows, 'usable row')}, "
            f"{scan.all_bad:,} bad",
            *([f"shard      {scan.shard}: {scan.rows} of the rows"] if scan.shard else []),
            f"tasks      {plural(scan.rows, 'prompt')} x {plural(config.num_samples, 'sample')} = "
            f"{scan.rows * config.num_samples}{_stops(config)}",
            *(f"model      {model}" for model in models),
            tools,
            *_user_tools(first),
            f"sandbox    {plan.sandbox or 'not needed'}",
            _limits(config),
            f"budget     {_budget(config)}",
            f"workers    {config.num_workers} x {plural(config.agents_per_worker, 'conversation')}",
        ]
    )


def _user_tools(setup: Setup) -> list[str]:
    """A line about the tools of simulated users, if they have any."""
    if not setup.user_toolsets:
        return []
    names = ", ".join(toolset.name for toolset in setup.user_toolsets)
    tools = ", ".join(tool.name for tool in collect_tools(setup.user_toolsets))
    return [f"user       {names} ({tools})"]


def _stops(config: RunConfig) -> str:
    rule = stopping_rule(config)
    return "" if rule is None else rule.describe()


def _limits(config: RunConfig) -> str:
    attempts = plural(config.max_attempts, "attempt")
    if config.agent is None:
        return f"limits     {plural(config.max_turns, 'turn')}, {attempts}"
    seconds = f"{config.max_conversation_s:g} s, " if config.max_conversation_s else ""
    return f"limits     {plural(config.max_turns, 'model call')}, {seconds}{attempts}"


def _budget(config: RunConfig) -> str:
    usd, tokens = config.max_run_cost_usd, config.max_run_tokens
    parts = [] if usd is None else [f"${usd:,g}"]
    parts += [] if tokens is None else [f"{tokens:,} tokens"]
    parts += [f"{name} ${usd:,g}" for name, usd in (config.model_budgets or {}).items()]
    return " and ".join(parts) or "none (--max_run_cost_usd sets one)"


def _describe(settings: ModelSettings, weight: float | None) -> str:
    place = f" at {settings.base_url}" if settings.base_url else ", offline"
    weighed = "" if weight is None else f", weight {weight:g}"
    description = f"{settings.name} ({settings.api}{place}{weighed})"
    if settings.api == SCRIPTED:
        return description
    if (own := settings.own_price) is not None:
        return f"{description}, your prices: {_price(own)}"
    from agent.models.prices import table_price

    known = table_price(settings)
    if known is None:
        example = json.dumps({settings.name: {"input": 1, "output": 2}})
        return f"{description}, price unknown (--prices='{example}' sets it)"
    return f"{description}, known prices: {_price(known)}"


def _price(price: Price) -> str:
    """A price, shown so that mistakes are seen before they cost."""
    cached = ", ".join(
        f"${dollars:g} {what}"
        for dollars, what in ((price.cache_read, "cache read"), (price.cache_write, "cache write"))
        if dollars != price.input
    )
    description = f"${price.input:g} in and ${price.output:g} out per million tokens"
    return f"{description} ({cached})" if cached else description


def _shares(plan: Plan) -> str:
    """The toolsets, with percentages if conversations draw them."""
    drawn = plan.config.toolset_percentages()
    return ", ".join(
        name if drawn is None else f"{name} {drawn[name]:g}%" for name in plan.toolsets
    )


def warn(plan: Plan, say: Callable[[str], object]) -> None:
    """Say what a careful user would want to know before the first call."""
    if (kind := find_network_type(plan.config.run_dir)) is not None:
        say(
            f"warning: {plan.config.run_dir} is on a file system of type {kind}: it is slow, and "
            "its locks and order of writes may not hold on other machines; better give "
            "--output_dir on a disk of this machine, and --mirror=URL for what must outlive it"
        )
    for base_url in dict.fromkeys(
        url for settings in called_models(plan.setups) for url in settings.urls
    ):
        url = urlsplit(base_url)
        if url.scheme == "http" and url.hostname and not _is_loopback(url.hostname):
            say(
                f"warning: {base_url} is not encrypted: others on the network can read prompts, "
                "replies and the API key; use https"
            )

    if plan.sandbox is not None and (warning := find_sandbox_warning(plan.config)):
        say(warning)
    if _needs_groups(plan) and not can_bound_memory():
        say(
            f"warning: sandbox {plan.sandbox}: cannot create a control group, so memory is checked "
            "ten times a second and may briefly exceed --command_memory_mb; make /sys/fs/cgroup "
            "writable for a strict limit"
        )
    if plan.config.token_ids and plan.config.agent is None:
        for message in warn_about_logprobs(plan.setups):  # asks servers
            say(message)
    if plan.config.agent is None:
        for name in find_unused_toolsets(plan.config):
            if name not in plan.config.disabled_toolsets:
                say(
                    f"warning: no conversation is offered the toolset {name!r}; add it to "
                    "--enabled_toolsets"
                )
    for message in list_refused_wishes(plan):
        say(f"warning: {message}")
    columns = dict(plan.scan.setup_columns)
    if not plan.config.is_inside:
        columns.pop("base_commit", None)  # many datasets have it, and no repository is at hand
    if columns and not plan.config.row_setup:
        named = _count_columns(columns)
        say(
            f"warning: {plan.config.dataset_file}: columns ignored without --row_setup: "
            f"{named}; see docs/tools.md"
        )


def list_refused_wishes(plan: Plan) -> Iterator[str]:
    """Describe the wishes of rows or options that are not granted; each begins with the dataset."""
    wishes = [*_refused_wishes(plan)]
    if not plan.config.audit and plan.config.checked_run is None:  # else there is no conversation
        wishes += _ignored_columns(plan)
    return (f"{plan.config.dataset_file}: {wish}" for wish in wishes)


def _ignored_columns(plan: Plan) -> Iterator[str]:
    """Describe columns that a user may take for a part of the conversation, and are none."""
    asked = plan.scan.asked
    if rows := asked.get(UNUSED_TURNS, 0):
        turns, line = asked[f"{UNUSED_TURNS}.all"], asked[f"{UNUSED_TURNS}.line"]
        number = "line" if plan.dataset.source is None else "row"
        yield (
            f"{plural(rows, 'row')} with further messages of the user, {turns:,} in all, which are "
            f"not sent (the first: {number} {line:,}): the model answers only the first message; "
            "to send a history, give `prompt` as a list; to send them one by one, `user_turns`"
        )
    if rows := asked.get(CHATS_AS_TEXT, 0):
        yield (
            f"{plural(rows, 'row')} whose `prompt` is the JSON text of chat messages, which is "
            "sent as it is; as the column `messages` it is read (--columns=messages=COLUMN)"
        )
    for name in TOOL_COLUMNS:
        if rows := asked.get(name, 0):
            yield (
                f"{plural(rows, 'row')} with definitions of tools in the column `{name}`, which "
                "are not offered; to offer tools of your own, give --tools (docs/tools.md)"
            )
    if rows := asked.get(MODEL_COLUMN, 0):
        yield (
            f"{plural(rows, 'row')} with a column `{MODEL_COLUMN}`, which counts only with --models"
        )


def _refused_wishes(plan: Plan) -> Iterator[str]:
    """Describe the wishes of rows or options that the run could grant."""
    largest, config = plan.scan.asked, plan.config
    checks = plan.scan.setup_columns.get("check") if config.row_setup else 0
    if config.until_passed and not (checks or config.reward or config.check_expected):
        yield "--until_passed: nothing judges samples (docs/rewards.md), so each prompt gets all"
    is_declined = not config.check_expected and "check_expected" in config.model_fields_set
    if (rows := largest.get(EXPECTED, 0)) and not config.reward and not is_declined:
        yield (
            f"{plural(rows, 'row')} with a column `{EXPECTED}`, which is only recorded: without "
            "--check_expected no answer is compared with it"
        )
    if (rows := largest.get(PROGRAMS, 0)) and config.row_setup and config.check_in == "same":
        yield (
            f"the checks of {plural(rows, 'row')} run programs of the workspace, which the model "
            "can replace by some that always succeed; `check_tasks` tries it (docs/tasks.md)"
        )
    if (rows := largest.get("network", 0)) and not config.network:
        yield f"no network without --network, though {plural(rows, 'row')} asked for it"
    if (rows := largest.get("check.network", 0)) and not config.check_network:
        yield (
            f"no network for checks without --check_network, though those of "
            f"{plural(rows, 'row')} asked for it; what a check cannot download makes it fail"
        )
    if (rows := largest.get("artifacts", 0)) and config.keep_workspaces is None:
        yield (
            f"{plural(rows, 'task')} would keep files (`artifacts`), which are not kept without "
            "--keep_workspaces=MB, which keeps all that a conversation changed; rewards do not "
            "depend on them"
        )
    for name, option, limit in (
        ("memory_mb", "command_memory_mb", config.command_memory_mb),
        ("disk_mb", "workspace_mb", config.workspace_mb),
    ):
        if (highest := largest.get(f"limits.{name}", 0)) > limit:
            yield (
                f"rows ask for up to {highest:,} MB (`limits.{name}`); they get {limit:,}, "
                f"the limit --{option}"
            )

    if "limits.cpus" in largest and _needs_groups(plan) and not can_limit_cpus():
        yield (
            "rows limit their CPUs (`limits.cpus`), which is not enforced: no control group can be "
            "made here; make /sys/fs/cgroup writable"
        )


def _needs_groups(plan: Plan) -> bool:
    """Whether control groups of ours limit what commands use."""
    return plan.sandbox is not None and not find_sandbox_class(plan.sandbox).limits_itself


def _is_loopback(host: str) -> bool:
    """Whether what is sent to `host` stays on this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def refuse_bad_rows(plan: Plan, say: Callable[[str], object]) -> None:
    """Name the bad rows; raise `DatasetError` if the config says that there may be none."""
    name_bad_rows(plan, say)
    if plan.config.on_bad_row == "fail" and plan.scan.all_bad:
        where = " in all shards (--dry_run without --shard names them)" if plan.scan.shard else ""
        raise DatasetError(
            f"{plan.config.dataset_file}: {plan.scan.all_bad} bad rows{where}, refused by "
            "--on_bad_row=fail; no model call was made"
        )


def name_bad_rows(plan: Plan, say: Callable[[str], object]) -> None:
    """Name bad rows, the first ones each, the rest by their number."""
    source, rows = plan.config.dataset_file, plan.scan.bad_rows
    number = ":" if plan.dataset.source is None else ": row "
    for row in rows[:_MAX_LISTED_BAD_ROWS]:
        say(f"{source}{number}{row.line}: discarded: {row.reason}")
    more = len(rows) - _MAX_LISTED_BAD_ROWS
    if more > 0:
        say(f"{source}: {plural(more, 'more bad row')}; a run lists all in failures.jsonl")
    if rows and plan.config.rows is not None:
        usable, bad = plan.scan.all_rows, plan.scan.all_bad
        say(f"{source}: {usable:,} of {usable + bad:,} rows can run")


def _read_script(path: Path | None) -> list[ScriptedTurn] | None:
    if path is None:
        return None
    from batch_trajectories.basics.yaml_file import YamlFileError, read_yaml  # only for a script

    try:
        turns = read_yaml(path, "script")
    except YamlFileError as error:
        raise ConfigError(str(error)) from error
    try:
        return parse_script(turns)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error


# What log-probabilities a run with `--token_ids` gets: not always those it samples with.

_NEUTRAL = {
    "temperature": (1,),
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "tool_choice": ("auto", "none"),
}
"""Values of options that leave the distribution as it is."""

_PATIENCE_S = 2.0


def warn_about_logprobs(setups: Setups) -> Iterator[str]:
    """Warnings for models with token ids whose log-probabilities are not those of the sampling.

    None for a server that is known to give those. A server of the user's own is asked for its mode.
    """
    for settings in called_models(setups):
        is_own = find_provider(settings.base_url or "") is None  # others give no token ids
        if not settings.token_ids or settings.api != "openai_chat" or not is_own:
            continue
        given = _changed_options(settings)
        where = f"token_ids: {settings.name} at {settings.base_url} samples"
        if grammar := given.keys() & {*GRAMMAR}:
            yield (
                f"{where} by a grammar ({', '.join(sorted(grammar))}): its logprobs are those "
                "after the grammar's mask, not those of the model itself (docs/endpoints.md)"
            )
        given = {name: value for name, value in given.items() if name not in GRAMMAR}
        mode = _logprobs_mode(settings) if given else None
        if not given or mode == "processed_logprobs":
            continue
        if settings.reference.startswith("sglang:") and set(given) <= {"temperature"}:
            continue  # its logprobs are those after the temperature
        options = ", ".join(f"{name} {value}" for name, value in given.items())
        known = ", unless it was started with --logprobs-mode processed_logprobs"
        if mode is not None:
            known = f" (--logprobs-mode {mode})"
        yield (
            f"{where} with {options}; the logprobs of vLLM are those before these options{known} "
            "(docs/endpoints.md)"
        )


def _changed_options(settings: ModelSettings) -> dict[str, object]:
    """The options of requests that change the distribution."""
    body = {"temperature": settings.temperature, "top_p": settings.top_p}
    given = sampling_fields({**body, **(settings.extra_body or {})})
    if "temperature" not in given:
        given["temperature"] = "of its own (none is given)"
    return {name: value for name, value in given.items() if value not in _NEUTRAL.get(name, ())}


def _logprobs_mode(settings: ModelSettings) -> str | None:
    """The `--logprobs-mode` of a vLLM server, which tells it if VLLM_SERVER_DEV_MODE is set."""
    import urllib.request
    from http.client import HTTPException

    root = (settings.base_url or "").rstrip("/").removesuffix("/v1")
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(f"{root}/server_info?config_format=json", timeout=_PATIENCE_S) as reply:
            mode = json.load(reply)["vllm_config"]["model_config"]["logprobs_mode"]
    except (OSError, HTTPException, ValueError, LookupError, TypeError):
        return None  # most servers do not say it
    return mode if isinstance(mode, str) else None
