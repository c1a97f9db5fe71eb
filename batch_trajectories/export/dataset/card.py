"""Writes the dataset card, for the Hugging Face hub and for readers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

import yaml

from batch_trajectories.basics.text import plural
from batch_trajectories.export.dataset.earlier import all_parts
from batch_trajectories.export.dataset.losses import kind_of_loss, task_counts
from batch_trajectories.export.rows.filter_options import Filters
from batch_trajectories.export.rows.format import load_format
from batch_trajectories.export.rows.recipe import Recipe, RunShare
from batch_trajectories.export.training_files import FAILED

_LISTS: dict[str, dict[str, Any]] = {
    "turns": {"list": [{"name": "from", "dtype": "string"}, {"name": "value", "dtype": "string"}]},
    "messages": {"list": "json"},
}

_SIZES = ((1_000, "n<1K"), (10_000, "1K<n<10K"), (100_000, "10K<n<100K"), (10**6, "100K<n<1M"))


_NOT_STATED = "not stated; say where they come from and their license"

_LAST_TURN = (
    "- LLaMA-Factory: `mask_history: true` learns the last turn of a row alone; "
    "`preserve_thinking: true`, or a template such as `qwen3_nothink`, keeps the reasoning of the "
    "turns before it"
)

_FIRST = {"TRL SFTTrainer": 0, "Axolotl": 1, "LLaMA-Factory": 2}
"""The trainers at the top of the table, in this order."""


class _Plain(yaml.SafeDumper):
    """Writes equal parts in full, for readers without YAML aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        """Write no aliases."""
        return True


def model_name(manifest: Mapping[str, Any]) -> str:
    """The name of the run that a dataset is made from; `mix` if there are several."""
    return str(manifest["run"]["name"]) if "run" in manifest else "mix"


def card(manifest: Mapping[str, Any], recipe: Recipe) -> str:
    """The content of README.md."""
    header = yaml.dump(
        _header(manifest, recipe), Dumper=_Plain, sort_keys=False, allow_unicode=True
    )
    return f"---\n{header}---\n\n" + "\n".join(_body(manifest, recipe)) + "\n"


def _header(manifest: Mapping[str, Any], recipe: Recipe) -> dict[str, Any]:
    configs: list[dict[str, Any]] = []
    infos: list[dict[str, Any]] = []
    for name, files in _files_by_config(manifest):
        configs.append(
            {
                "config_name": name,
                "data_files": [
                    {"split": split, "path": _pattern(paths[0])} for split, paths in files.items()
                ],
                **({} if configs else {"default": True}),
            }
        )
        if _suffix(manifest) == ".jsonl":  # other files say what their columns are
            infos.append({"config_name": name, "features": _features(name, manifest)})
    rows = max((part["rows"] for part in all_parts(manifest)), default=0)
    size = next((name for limit, name in _SIZES if rows < limit), "n>1M")
    return {
        **({"pretty_name": recipe.card.title} if recipe.card.title else {}),
        "license": recipe.card.license,
        **({"language": [recipe.card.language]} if recipe.card.language else {}),
        "size_categories": [size],
        "task_categories": ["text-generation"],
        "tags": ["agent", "tool-use", "synthetic", "sharegpt"],
        **({"configs": configs} if configs else {}),
        **({"dataset_info": infos} if infos else {}),
    }


def _files_by_config(manifest: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, list[str]]]]:
    """The configs of the hub by name, each with the files by split."""
    # The hub's loader reads all configs of a repository as one kind of file.
    suffix = _suffix(manifest)
    names = set[str]()
    for part in all_parts(manifest):
        by_config: dict[str, list[str]] = {}
        for file in part["files"]:
            if _is_loaded(part) and file["path"].endswith(suffix):
                by_config.setdefault(file["split"], []).append(file["path"])
        if by_config and part["format"] not in names:
            names.add(part["format"])
            yield part["format"], by_config


def _pattern(path: str) -> str:
    """The path of a file; for a shard, a pattern of all shards."""
    folder, _, name = path.rpartition("/")
    return f"{folder}/*.{name.rpartition('.')[2]}" if "-of-" in name else path


def _suffix(manifest: Mapping[str, Any]) -> str:
    """The suffix of the files that the hub loads: Parquet, else JSON lines, else Arrow."""
    loaded = [*filter(_is_loaded, manifest["formats"])] or filter(_is_loaded, all_parts(manifest))
    files = (file["path"] for part in loaded for file in part["files"])
    written = {PurePath(path).suffix for path in files}
    return next((kind for kind in (".parquet", ".jsonl") if kind in written), ".arrow")


def _is_loaded(part: Mapping[str, Any]) -> bool:
    """Whether `load_dataset` can read a format: its columns are known."""
    return bool(load_format(part["format"]).columns)


def _features(name: str, manifest: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The columns of a format, as the export wrote them whose files are there."""
    recipe = next(
        one["recipe"]
        for one in (manifest, *manifest.get("earlier", ()))
        if any(part["format"] == name for part in one["formats"])
    )
    columns = load_format(name).list_columns(lists_tools=recipe["tools"] == "list")
    return [
        {"name": column, **_LISTS.get(kind, {"dtype": kind})} for column, kind in columns.items()
    ]


def _files_by_trainer(manifest: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The trainers that can read a file of the dataset, each with the best file for it."""
    files = [file["path"] for part in all_parts(manifest) for file in part["files"]]
    folders = {path.partition("/")[0]: path for path in reversed(files)}
    known = [
        t for part in all_parts(manifest) for t in load_format(part["format"]).trainers.items()
    ]
    for trainer, read in sorted(known, key=lambda one: _FIRST.get(one[0], len(_FIRST))):
        if readable := [folder for folder in read if folder in folders]:
            path = readable[0] if readable[0].endswith("_hf") else _pattern(folders[readable[0]])
            yield trainer, f"`{path}`"


def _body(manifest: Mapping[str, Any], recipe: Recipe) -> Iterator[str]:
    yield f"# {recipe.card.title or model_name(manifest)}"
    yield ""
    yield "Conversations of tool-using agents, generated by models; none was written by a person."
    yield ""
    yield "## Where it comes from"
    yield ""
    yield from _origin(manifest, recipe)
    yield ""
    yield "## What is in it"
    yield ""
    yield from _formats(manifest)
    yield from _facts_by_format(manifest, recipe)
    yield ""
    yield from _choices(manifest, recipe)
    if "parity" in manifest:
        yield ""
        yield "## Chat templates"
        yield ""
        yield from _parity(manifest["parity"])
    yield ""
    yield "## What was left out"
    yield ""
    yield from _left_out_table(manifest, recipe)
    yield ""
    yield "`manifest.json` has the recipe, all counts and a sha256 per file."


def _origin(manifest: Mapping[str, Any], recipe: Recipe) -> Iterator[str]:
    for model in manifest["models"]:
        yield f"- model `{model['model']}`: {plural(model['records'], 'conversation')}"
    for toolset in manifest["statistics"]["toolsets"]:
        yield f"- toolset `{toolset['toolset']}`: offered in {toolset['percent']}%"
    if "run" in manifest:
        yield f"- prompts: {recipe.card.prompt_source or _NOT_STATED}"
    yield "- terms of the models' providers on training: check them before you publish this"
    for run in manifest.get("runs") or [manifest["run"]]:
        yield f"- run `{run['name']}`, config {run['config_digest']}, prompts x samples = " + (
            f"{run['prompts']:,} x {run['samples']:,}"
        )
        if (audit := run.get("audit")) is not None:
            rows = ", ".join(f"{count:,} {verdict}" for verdict, count in audit["rows"].items())
            yield (
                f"- tasks audited before the run (`{audit['audit']}`), only sound ones used: {rows}"
            )
    if "runs" in manifest:
        yield ""
        yield from _runs(manifest, recipe)


def _formats(manifest: Mapping[str, Any]) -> Iterator[str]:
    """A table of the formats, how to read each one, and the file for each trainer."""
    yield from _table(
        ("format", "rows", "rejected", "bytes per row: median", "99%", "longest"),
        [
            (
                part["format"],
                f"{part['rows']:,}",
                f"{part['rejected']:,}",
                *(str(part["row_bytes"][key] or "-") for key in ("p50", "p99", "max")),
            )
            for part in manifest["formats"]
        ],
    )
    yield ""
    yield "Trainers cut or drop long rows: TRL at 1,024 tokens by default, LLaMA-Factory at 2,048."
    yield ""
    for part in manifest["formats"]:
        yield f"- **{part['format']}**: {load_format(part['format']).card}"
    for one in manifest.get("earlier", ()):
        for part in one["formats"]:
            yield (
                f"- **{part['format']}**: {load_format(part['format']).card} An earlier export "
                f"wrote {plural(part['rows'], 'row')}; its recipe and counts are under `earlier` "
                "in manifest.json."
            )
    if files := list(_files_by_trainer(manifest)):
        yield ""
        yield from _table(("trainer", "file"), files)
        yield ""


def _facts_by_format(manifest: Mapping[str, Any], recipe: Recipe) -> Iterator[str]:
    if manifest["recipe"].get("arguments") == "text":
        yield "- Arguments in messages are JSON text; where a model wrote no object, what it wrote."
    by_name = {part["format"]: part for part in manifest["formats"]}
    for part in by_name.values():
        if count := part.get("rows_with_null_arguments"):
            yield (
                f"- arguments that are null in {plural(count, 'row')} of `{part['format']}`: "
                "Axolotl drops these from JSON lines, not from Parquet."
            )
        if splits := part.get("splits_with_late_keys"):
            yield (
                f"- `datasets` refuses the JSON lines of `{part['format']}` ({', '.join(splits)}) "
                "as a file of their own, because only later rows have reasoning, calls or "
                "results; through this card it reads them."
            )
        if segments := part.get("segments"):
            yield _segments(part["format"], segments, is_marked=part["marks_loss"])
        if others := part.get("turns_of_others"):
            yield _other_authors(part["format"], others, is_marked=part["marks_loss"])
        yield from _masked_lines(part, recipe)


def _choices(manifest: Mapping[str, Any], recipe: Recipe) -> Iterator[str]:
    """Reasoning, and the choices of the recipe that change how rows look."""
    reasoning = manifest["statistics"]["reasoning"]
    hidden = reasoning.get("hidden", 0)
    yield (
        f"- reasoning: in {reasoning['with_reasoning']:,} of {reasoning['assistant_turns']:,} "
        + (f"turns, style `{recipe.reasoning or 'as each format has it'}`")
        + (f"; {plural(hidden, 'more turn')} had some that the API hides" if hidden else "")
    )
    if recipe.per_turn:
        yield "- one row per turn: only the last turn of a row is to be learnt"
    has_llamafactory = any(part["format"] == "llamafactory" for part in manifest["formats"])
    if has_llamafactory and (recipe.per_turn or recipe.segments):
        yield _LAST_TURN
    yield f"- system prompts: `{recipe.system or 'as each format has it'}`"
    yield f"- parallel calls: `{recipe.parallel_calls}`"
    by = ", ".join(["prompt", *(f"`{column}`" for column in recipe.split_by)])
    yield f"- splits by {by}: {', '.join(f'{k} {v:g}' for k, v in recipe.splits.items())}"
    if recipe.sort is not None:
        yield f"- order: `{recipe.sort}`"


def _left_out_table(manifest: Mapping[str, Any], recipe: Recipe) -> Iterator[str]:
    """A table of what was left out by reason, and what rows were searched for."""
    reasons = manifest["rejected_by_reason"]
    known = task_counts(manifest)
    counts = [(key, known.get(key, 0)) for key in ("discarded", FAILED, "pending")]
    counts += [
        (f"{kind_of_loss(reason)}: {reason}", count)
        for reason, count in reasons.items()
        if reason != FAILED
    ]
    yield from _table(
        ("of tasks", f"{manifest['tasks']:,}"),
        [
            *((reason, f"{count:,}") for reason, count in counts if count),
            ("selected", f"{manifest['selected']:,}"),
        ],
    )
    filters = recipe.filters
    yield ""
    yield f"- scanned for secrets: {'no' if filters.secrets == 'off' else filters.secrets}"
    yield f"- compared with benchmarks: {_describe_comparison(filters)}"
    for one in manifest.get("evaluation", ()):
        revision = f", revision {one['revision']}" if one["revision"] else ""
        by = ", ".join(f"{count:,} by {name}" for name, count in one["left_out"].items())
        questions = plural(one["questions"], "question")
        yield f"  - `{one['name']}`{revision}: {questions}; left out: {by or 0}"
    yield "- personal data: not looked for"


def _runs(manifest: Mapping[str, Any], recipe: Recipe) -> Iterator[str]:
    """A table of the runs of a mix; facts that are unknown are named as such."""
    parity = [one["runs"] for one in manifest.get("parity", ()) if "runs" in one]
    rows = []
    for run in manifest["runs"]:
        name = run["name"]
        share = recipe.runs.get(name, RunShare())
        counts = [of[name] for of in parity if name in of]
        proved = sum(count["same"] == count["rows"] for count in counts)
        rows.append(
            (
                f"`{name}`",
                f"{run['selected']:,} of {run['tasks']:,}",
                share.license or "not stated",
                share.prompt_source or _NOT_STATED,
                f"`{run['audit']['audit']}`" if "audit" in run else "none",
                f"{proved} of {len(counts)} templates" if counts else "not proved",
            )
        )
    yield from _table(("run", "conversations", "license", "prompts", "audit", "parity"), rows)


def _parity(parity: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    proved = [f"`{one['template']}`" for one in parity if one["is_proved"]]
    yield (
        f"Rendered by {plural(len(parity), 'chat template')}; in {len(proved):,} of them every "
        "turn is learnt in the context that inference has"
        f"{': ' if proved else '.'}{', '.join(proved)}"
    )
    others = [one for one in parity if not one["is_proved"] and "failed" not in one]
    if others:
        yield ""
        yield from _table(
            ("template", "turns", "other context", "reasoning lost", "rows refused", "mended by"),
            [
                (
                    one["template"],
                    f"{one['turns']:,}",
                    f"{sum(one['causes'].values()):,}",
                    f"{one['reasoning_lost']:,}",
                    f"{sum(one['refused'].values()):,}",
                    one["mend"] or "-",
                )
                for one in others
            ],
        )


_AUTHORS = {
    "prompt": "the prompt",
    "parent": "the conversation that was branched",
    "other_model": "another model",
    "context": "another row, or of another author",
}


def _segments(name: str, segments: Mapping[str, Any], *, is_marked: bool) -> str:
    counts = ", ".join(f"{count:,} of {of}" for of, count in segments["conversations"].items())
    text = f"- rows of `{name}` show messages as the model saw them: {counts}, "
    text += f"{plural(segments['turns'], 'turn')}, each learnt in one row"
    if not is_marked:
        text += "; only the last turn of a row is to be learnt"
    if unknown := segments["unknown_turns"]:
        text += f"; {plural(unknown, 'turn')} left out, for which records do not say what was shown"
    return text


def _other_authors(name: str, others: Mapping[str, int], *, is_marked: bool) -> str:
    counts = ", ".join(f"{count:,} of {_AUTHORS[author]}" for author, count in others.items())
    if not is_marked:
        return f"  - turns of others: {counts}; {name} cannot mark them, so trainers learn them"
    return f"  - turns of others: {counts}; marked, so they carry no loss"


def _describe_comparison(filters: Filters) -> str:
    if not filters.evaluation_files:
        return "no"
    places = " and ".join(filters.evaluation_search).replace("_", " ").replace("all", "all texts")
    words = f"{filters.evaluation_words} words in a row, in {places}" if places else ""
    columns = ", ".join(f"`{name}`" for name in filters.evaluation_columns)
    return "; ".join(filter(None, (words, f"columns {columns}" if columns else "")))


def _masked_lines(part: Mapping[str, Any], recipe: Recipe) -> Iterator[str]:
    if masked := part.get("masked"):
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in masked["by_reason"].items())
        how = "left out" if recipe.per_turn else "marked" if "marks_loss" in part else "mask 0"
        yield (
            f"- {part['format']}: {masked['turns']:,} of {plural(masked['of'], 'turn')} carry no "
            "loss" + (f" ({reasons}); {how}" if reasons else "")
        )
    if count := part.get("not_passed"):
        yield (
            f"- {part['format']}: {plural(count, 'conversation')} did not pass or ended early "
            "(`included` in their metadata)"
        )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield f"| {' | '.join(row)} |"
