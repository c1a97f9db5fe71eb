"""What log-probabilities a run with `--token_ids` gets: not always those it samples with."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from http.client import HTTPException

from agent.messages.tokens import GRAMMAR, sampling_in
from agent.models.model import ModelSettings
from agent.models.providers import provider_at
from batch_trajectories.runs.config.models import Setups, called_models

_NEUTRAL = {
    **{"temperature": (1,), "top_p": (1,), "top_k": (0, -1), "min_p": (0,)},
    **{"presence_penalty": (0,), "frequency_penalty": (0,), "repetition_penalty": (1,)},
    "tool_choice": ("auto", "none"),
}
"""Values of options that leave the distribution as it is."""

_PATIENCE_S = 2.0


def on_logprobs(setups: Setups) -> Iterator[str]:
    """Warnings for models with token ids whose log-probabilities are not those of the sampling.

    None for a server that is known to give those. A server of the user's own is asked for its mode.
    """
    for settings in called_models(setups):
        is_own = provider_at(settings.base_url or "") is None  # others give no token ids
        if not settings.token_ids or settings.api != "openai_chat" or not is_own:
            continue
        given = _changed(settings)
        where = f"token_ids: {settings.name} at {settings.base_url} samples"
        if grammar := given.keys() & {*GRAMMAR}:
            yield (
                f"{where} by a grammar ({', '.join(sorted(grammar))}): its logprobs are those "
                "after the grammar's mask, not those of the model itself (docs/endpoints.md)"
            )
        given = {name: value for name, value in given.items() if name not in GRAMMAR}
        mode = _mode_of(settings) if given else None
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


def _changed(settings: ModelSettings) -> dict[str, object]:
    """The options of requests that change the distribution."""
    body = {"temperature": settings.temperature, "top_p": settings.top_p}
    given = sampling_in({**body, **(settings.extra_body or {})})
    if "temperature" not in given:
        given["temperature"] = "of its own (none is given)"
    return {name: value for name, value in given.items() if value not in _NEUTRAL.get(name, ())}


def _mode_of(settings: ModelSettings) -> str | None:
    """The `--logprobs-mode` of a vLLM server, which tells it if VLLM_SERVER_DEV_MODE is set."""
    root = (settings.base_url or "").rstrip("/").removesuffix("/v1")
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(f"{root}/server_info?config_format=json", timeout=_PATIENCE_S) as reply:
            mode = json.load(reply)["vllm_config"]["model_config"]["logprobs_mode"]
    except (OSError, HTTPException, ValueError, LookupError, TypeError):
        return None  # most servers do not say it
    return mode if isinstance(mode, str) else None
