"""The groups of options in the help and in docs/options.md."""

from __future__ import annotations

COMMON_OPTIONS = (
    *("config_file", "dataset_file", "run_name"),
    *("model", "base_url", "max_tokens", "enabled_toolsets", "sandbox", "max_turns"),
    *("num_samples", "num_workers", "batch_size", "max_run_cost_usd", "dry_run"),
)
"""Options of a run that `--help` shows; `--help_all` shows all."""

RARE_OPTIONS = ("fresh", "accept_config_change", "live", "help_all")
"""Options of a start that only `--help_all` shows."""

OPTION_GROUPS: dict[str, tuple[str, ...]] = {
    "Data": (
        *("dataset_file", "columns", "rows", "run_name", "output_dir", "mirror", "num_samples"),
        *("until_passed", "also_failed", "max_samples"),
        *(
            "only_sound",
            "on_bad_row",
            "require_reasoning",
            "require_passed",
            "accept_rows",
            "empty_think",
        ),
        *("seed", "shard", "forks"),
    ),
    "Agent": ("agent",),
    "Model": (
        *("model", "models", "escalate_after", "model_budgets", "endpoints"),
        *("prices", "base_url", "api", "key_env"),
        "system_prompt",
        *("temperature", "top_p", "max_tokens", "reasoning_effort"),
        *("prompt_caching", "extra_body", "stream_replies", "token_ids"),
        "script_file",
    ),
    "Tools and sandbox": (
        *("enabled_toolsets", "disabled_toolsets", "distribution", "tools", "mcp", "sandbox"),
        *("workspace", "workdir", "images", "docker_image"),
        *("container_engine", "container_runtime", "pull"),
        *("row_setup", "check_in", "check_network", "reward", "reward_timeout_s"),
        "keep_workspaces",
        *("env_from", "network"),
        *("command_timeout_s", "tool_timeout_s"),
        *("command_memory_mb", "max_processes", "workspace_mb"),
        *("web_search_provider", "web_allow"),
    ),
    "Workers, limits and budget": (
        *("num_workers", "batch_size", "concurrency", "max_run_cost_usd", "max_run_tokens"),
        *("max_in_flight", "start_in_flight", "rpm", "tpm", "shared_limits"),
    ),
    "Batch API of the provider": (*("batch_api", "batch_wait_s", "batch_max_requests"),),
    "Workers on a Ray cluster": (*("executor", "ray_address", "worker_resources", "ray_storage"),),
    "Retries, timeouts and log": (
        *("max_attempts", "call_attempts", "attempt_timeout_s", "idle_timeout_s", "max_rebuild_s"),
        *("call_timeout_s", "grace_s", "heartbeat_timeout_s", "log_level"),
    ),
}
"""The groups of a run's options; those of conversations and of a start follow below."""

OF_CONVERSATIONS = "Conversations (a row can set most of these in its column agent_options)"
OF_STARTS = "This start"
