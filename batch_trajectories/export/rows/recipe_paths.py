"""Paths in the file of a recipe, which are relative to it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from batch_trajectories.basics.validation import path_beside, place_beside


def with_paths(loaded: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """What a recipe's file in `directory` holds, with its paths as seen from here.

    Functions and templates, which can also be in modules and packages, are looked for there first.
    """
    made = dict(loaded)
    if isinstance(filters := loaded.get("filters"), dict):
        made["filters"] = _of_filters(filters, directory)
    if isinstance(mask := loaded.get("mask"), dict) and "function" in mask:
        made["mask"] = {**mask, "function": place_beside(mask["function"], directory)}
    if isinstance(fit := loaded.get("fit"), dict) and isinstance(fit.get("template"), str):
        made["fit"] = {**fit, "template": path_beside(fit["template"], directory)}
    return made


def _of_filters(filters: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    made = dict(filters)
    if isinstance(tokenizer := filters.get("tokenizer"), str):
        made["tokenizer"] = str(directory / tokenizer)
    if isinstance(files := filters.get("evaluation_files"), list):
        made["evaluation_files"] = [
            str(file) if str(file).startswith("hf:") else str(directory / str(file))
            for file in files
        ]
    if isinstance(answer := filters.get("answer"), dict) and "function" in answer:
        made["answer"] = {**answer, "function": place_beside(answer["function"], directory)}
    return made
