"""Write the report of a run: an HTML file, and files with its data if there is much."""

from __future__ import annotations

import base64
import hashlib
import secrets
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson
from pydantic import ValidationError

from batch_trajectories.api.stored_run import StoredRun
from batch_trajectories.audit.verdicts import shows_defect, verdict_lines
from batch_trajectories.basics import exact_json
from batch_trajectories.basics.console import say
from batch_trajectories.basics.errors import ConfigError, RunDirError, help_for_write
from batch_trajectories.dataset.source import HUB_PREFIX
from batch_trajectories.engine.run_totals import read_spending, spent_by_judges
from batch_trajectories.export.conversation.own_work import AuthoredWork
from batch_trajectories.export.conversation.reading import read_conversation
from batch_trajectories.export.conversation.row_json import dumps_row
from batch_trajectories.export.conversation.style import Style
from batch_trajectories.export.conversation.turns import Conversation, Turn, compute_once
from batch_trajectories.export.formats.hermes import make_turns
from batch_trajectories.export.statistics.health import Health, problems_in
from batch_trajectories.export.statistics.rewards import RewardStatistics
from batch_trajectories.export.training_files import route_record, run_style
from batch_trajectories.records.failures import NO_LIMIT, failures_by_class, stored_failures
from batch_trajectories.records.files import (
    StorageError,
    make_directory,
    open_temporary,
    replace_file,
)
from batch_trajectories.records.names import EXPORTS, MANIFEST_FILE
from batch_trajectories.records.reader import RecordPart, process_records
from batch_trajectories.records.record_types import Record, Tools
from batch_trajectories.report.facts import make_table_row
from batch_trajectories.report.page.frame import frame_page, join_scripts, read_part

if TYPE_CHECKING:
    from batch_trajectories.engine.stopping import StoppingRule
    from batch_trajectories.export.masking import Masks


# The tasks of an audit as rows and records of the page: the status of a task is its verdict.


def task_row(line: Mapping[str, Any]) -> dict[str, Any]:
    """The row of the table for a line of tasks.jsonl; its steps are the `tools` of the row."""
    done = Counter(part["step"] for part in line["steps"])
    against = Counter(part["step"] for part in line["steps"] if shows_defect(part))
    return {
        "id": line["id"],
        "status": line["verdict"],
        "error": None,
        "prompt": line["why"],
        "calls": done.total(),
        "failed_calls": against.total(),
        **line["times"],
        "tools": {name: [count, against[name]] for name, count in done.items()},
        "flags": line["defects"],
    }


def task_record(line: Mapping[str, Any]) -> dict[str, Any]:
    """The facts of a task that the page shows."""
    steps = [{**part, "against": shows_defect(part)} for part in line["steps"]]
    return {**line, "steps": steps, "tools": [], "training_form": None}


# The data of a report: inside the page if it is small, else in files beside it.
#
# report_files/rows.js the rows of the table, some thousand per line report_files/chunk-0.js whole
# records, loaded when one of them is opened report_files/chunk-1.js …
#
# Several processes can each collect a part; the number of the first record of a part is that of
# its first chunk, so all chunks have different numbers.
#
# A page that was opened from disk may not fetch files but may load scripts. So each file is a
# script that passes its data to the page: reportData(report, kind, number, String.raw`JSON`).

INLINE_BYTES = 4 << 20
"""The maximum of data inside the page itself."""

_CHUNK_BYTES = 512 << 10
_ROWS_BYTES = 1 << 20


class Collected(NamedTuple):
    """The result of `Pieces`."""

    rows: bytes
    records: bytes
    """The records and rows as JSON lists for the page; empty lists if they are in files."""
    row_pieces: int
    """The number of files with rows; 0 if the rows are in the page."""
    rows_file: Path


class Pieces:
    """Collects rows and records of a report; keeps at most one piece in memory."""

    def __init__(self, directory: Path, report_id: str, *, inline_bytes: int, first: int) -> None:
        """`put_in_place` will put the files into `directory`.

        `first` is the number of the first record; more than `inline_bytes` goes to files.
        """
        self._directory = directory
        self._temporary = temporary_directory(directory)
        self._report_id = report_id
        self._inline_bytes = inline_bytes
        self._is_inline = True
        self._rows_file = self._temporary / f"rows-{first}.js"
        self._rows: list[bytes] = []
        self._records: list[bytes] = []
        self._rows_size = self._records_size = 0
        self._row_pieces = 0
        self._chunk = first

    def add(self, row: dict[str, Any], record: bytes) -> None:
        """Add a trajectory; `record` is its JSON. Adds the place of its record to the row."""
        line = exact_json.dumps([*row.values(), self._chunk, len(self._records)])
        self._rows.append(line)
        self._records.append(record)
        self._rows_size += len(line)
        self._records_size += len(record)
        if self._is_inline and self._rows_size + self._records_size > self._inline_bytes:
            self._is_inline = False
            self._temporary.mkdir(mode=0o700, exist_ok=True)
        if not self._is_inline:
            if self._records_size >= _CHUNK_BYTES:
                self._write_records()
            if self._rows_size >= _ROWS_BYTES:
                self._write_rows()

    def finish(self) -> Collected:
        """Write what is left; the files are still temporary."""
        if not self._is_inline:
            self._write_records()
            self._write_rows()
        rows, records = _write_list(self._rows), _write_list(self._records)
        return Collected(rows, records, self._row_pieces, self._rows_file)

    def _write_records(self) -> None:
        if self._records:
            path = self._temporary / f"chunk-{self._chunk}.js"
            self._write(path, "chunk", self._chunk, self._records)
            self._chunk += 1
            self._records, self._records_size = [], 0

    def _write_rows(self) -> None:
        if self._rows:
            self._write(self._rows_file, "rows", self._row_pieces, self._rows)
            self._row_pieces += 1
            self._rows, self._rows_size = [], 0

    def _write(self, path: Path, kind: str, number: int, items: list[bytes]) -> None:
        # As a string to parse: in a JavaScript literal, a key __proto__ would not be data. A raw
        # string ends at a backtick and begins a value at ${, which JSON has only inside strings.
        json = _write_list(items).replace(b"`", b"\\u0060").replace(b"$", b"\\u0024")
        head = f'reportData("{self._report_id}", "{kind}", {number}, String.raw`'
        call = b"".join((head.encode(), json, b"`);\n"))
        if path.exists():
            with path.open("ab") as file:
                file.write(call)
            return
        with open_temporary(path, self._directory / path.name) as file:
            file.write(call)


def temporary_directory(directory: Path) -> Path:
    """The directory of the files until they are moved into `directory`."""
    return directory.with_name(f"{directory.name}.part")


def put_in_place(directory: Path, parts: Sequence[Collected]) -> None:
    """Replace the files in `directory` by those of all parts, in order; only remove them if there
    are no new ones."""
    remove_files(directory)
    written = [part.rows_file for part in parts if part.row_pieces]
    if not written:
        return
    first, *others = written
    with first.open("ab") as rows:
        for other in others:
            with other.open("rb") as file:
                shutil.copyfileobj(file, rows)
            other.unlink()
    make_directory(directory)
    first.rename(first.with_name("rows.js"))
    for path in temporary_directory(directory).iterdir():
        path.replace(directory / path.name)


def remove_files(directory: Path) -> None:
    """Remove the files of an earlier report; other files stay."""
    for pattern in ("rows.js", "chunk-*.js"):
        for path in directory.glob(pattern):
            path.unlink()
    if directory.is_dir() and not any(directory.iterdir()):
        directory.rmdir()


def _write_list(items: list[bytes]) -> bytes:
    return b"[" + b",".join(items) + b"]"


_BEGINNING = b"<!doctype html>"


class WrittenPage(NamedTuple):
    """The result of `write_report`."""

    path: Path
    rows: int
    """The number of trajectories, or of tasks on the page of an audit."""
    files: Path | None
    """The directory with the data of the page; None if all data is in the page."""


def write_report(
    stored: StoredRun, output: Path | None = None, *, inline_bytes: int = INLINE_BYTES
) -> WrittenPage:
    """Write the report of a run to `output` (default: report.html in its directory).

    Reads one record at a time, of a large run in several processes; more data than `inline_bytes`,
    and all data of several processes, goes to files in
    `<output's stem>_files`. Raises `RunDirError` and `StorageError`.
    """
    run = stored.identity
    path = output or stored.path / "report.html"
    if path.is_dir() or not path.parent.is_dir():
        raise RunDirError(
            f"{path}: cannot write the report there; --output names a file in a directory"
        )
    if path.exists() and not _is_page(path):
        raise RunDirError(
            f"{path}: exists and is not a report; give a new file or an older report by --output"
        )
    report_id = secrets.token_hex(8)
    directory = path.with_name(f"{path.stem}_files")
    style = run_style(run["config"])
    masks = masks_of_dataset(stored.path)
    samples, rule = run["config"]["num_samples"], stored.rule

    def collect(some: RecordPart) -> _Part:
        limit = inline_bytes if some.are_all else 0
        pieces = Pieces(directory, report_id, inline_bytes=limit, first=some.first)
        part = _Part(samples, rule, _Distinct(some.first), _Distinct(some.first))
        for records in some.few:
            part.add(records, style, masks, pieces)
        part.collected = pieces.finish()
        return part

    def collect_tasks() -> _Part:
        pieces = Pieces(directory, report_id, inline_bytes=inline_bytes, first=0)
        part = _Part(samples, rule, _Distinct(0), _Distinct(0))
        for line in verdict_lines(stored.path, stored.scan):
            part.add_task(line, pieces)
        part.collected = pieces.finish()
        return part

    is_audit = bool(run["config"].get("audit"))
    about = cache(partial(_describe_run, stored))
    try:
        shutil.rmtree(temporary_directory(directory), ignore_errors=True)
        if is_audit:
            parts = [collect_tasks()]
        else:
            parts = process_records(stored.path, collect, doing="report", meanwhile=about)
        whole, *others = parts
        put_in_place(directory, [part.collected for part in parts])
    except OSError as error:
        raise StorageError(
            f"{path}: cannot write the report: {error.strerror or error}; {help_for_write(error)}, "
            "or give another place by --output"
        ) from error
    finally:
        shutil.rmtree(temporary_directory(directory), ignore_errors=True)
    for part in others:
        whole.merge(part)
    whole.health.add_failures(stored_failures(stored.path))
    row_pieces = sum(part.collected.row_pieces for part in parts)
    meta = {
        **about(),
        "rewards": whole.rewards.to_json(),
        "health": problems_in(whole.health.to_json(stored.price_of)),
        "caches": whole.health.caches.to_json(stored.price_of),
        "is_audit": is_audit,
        "report_id": report_id,
        "columns": whole.columns,
        "tools": whole.tools.values,
        "systems": whole.systems.values,
        "row_pieces": row_pieces,
        "files": directory.name if row_pieces else None,
    }
    rows, records = whole.collected.rows, whole.collected.records
    replace_file(path, render_page(meta, rows=rows, records=records))
    return WrittenPage(path, whole.count, directory if row_pieces else None)


class _Part:
    """The page's facts about some records, and the place of their data."""

    collected: Collected

    def __init__(
        self, samples: int, rule: StoppingRule | None, tools: _Distinct, systems: _Distinct
    ) -> None:
        self.rewards, self.health = RewardStatistics(samples, rule), Health(samples)
        self.tools, self.systems = tools, systems
        self.columns: list[str] = []
        self.count = 0

    def add(
        self, records: Sequence[Record], style: Style, masks: Masks | None, pieces: Pieces
    ) -> None:
        given = [(record, AuthoredWork(record)) for record in records]
        # First the rows: what reads a conversation counts its replies on the way.
        forms = [
            training_form(record, own, style=style, masks=masks, key_of=self.systems.key)
            for record, own in given
        ]
        for record, own in given:
            self.rewards.add(record)
            self.health.add(record, own)
        rows = [make_table_row(record, own) for record, own in given]
        for row, form in zip(rows, forms, strict=True):
            row["exported"] = form["file"]
        self.columns = [*rows[-1], "chunk", "place"]
        shown = [
            record.splice(
                {
                    "tools": compute_once(record.tools, self._tools_shown),
                    "training_form": dumps_row(form)[:-1],  # without its newline
                }
            )
            for record, form in zip(records, forms, strict=True)
        ]
        for row, json in zip(rows, shown, strict=True):
            pieces.add(row, json)
        self.count += len(records)

    def add_task(self, line: Mapping[str, Any], pieces: Pieces) -> None:
        """Add a line of tasks.jsonl."""
        row = task_row(line)
        self.columns = [*row, "chunk", "place"]
        pieces.add(row, exact_json.dumps(task_record(line)))
        self.count += 1

    def _tools_shown(self, tools: Tools) -> bytes:
        return orjson.dumps(list(map(self.tools.key, tools)))

    def merge(self, other: _Part) -> None:
        """Add the records of `other`, which come after those of this one."""
        self.rewards.merge(other.rewards)
        self.health.merge(other.health)
        self.tools.values |= other.tools.values
        self.systems.values |= other.systems.values
        self.count += other.count


def _is_page(path: Path) -> bool:
    """Whether a file is a page or empty, so the report may replace it."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(_BEGINNING)).lower() in (_BEGINNING, b"")


def masks_of_dataset(run_dir: Path, *, calls_functions: bool = True) -> Masks | None:
    """The masks of a run's dataset at its usual place; None without a dataset that masks turns.

    Unless it `calls_functions`, without what a function of the user masks; also without it if
    somebody else wrote the recipe, whose function may be anything.
    """
    try:
        manifest = orjson.loads((run_dir / EXPORTS / "dataset" / MANIFEST_FILE).read_bytes())
    except (OSError, orjson.JSONDecodeError):
        return None  # the funnel says that it cannot be read
    if not isinstance(manifest, dict) or not manifest.get("recipe", {}).get("mask"):
        return None
    from batch_trajectories.export.dataset.recipe_origin import untrusted_parts
    from batch_trajectories.export.rows.recipe import Recipe

    try:
        recipe = Recipe.model_validate(manifest["recipe"])
        is_called = recipe.mask is not None and recipe.mask.function and calls_functions
        if is_called and untrusted_parts(manifest):
            calls_functions = False
            say(
                f"warning: {run_dir}/exports/dataset/manifest.json: you did not write this recipe "
                "here: the page does not show what its function masks"
            )
        if recipe.mask is not None and not calls_functions:
            mask = recipe.mask.model_copy(update={"function": None})
            recipe = recipe.model_copy(update={"mask": mask})
        return recipe.open_masks()
    except (ConfigError, ValidationError) as error:
        say(f"warning: {error}; the page does not show which turns the dataset masks")
        return None


def _describe_run(stored: StoredRun) -> dict[str, Any]:
    run = stored.identity
    # The reason why it is unknown would name a path of this machine.
    funnel, _, signs = stored.funnel_if_known()
    return {
        "run_name": run["run_name"],
        "created": run["created"],
        "written_at": time.time(),
        "is_running": stored.holder is not None,
        "tasks": _tasks(run, funnel),
        "samples": run["config"]["num_samples"],
        "bad_rows": run["dataset"]["bad_rows"],
        "dataset": dataset_name(run["dataset"]),
        "meaning": run["meaning"],
        "history": run["history"],
        "versions": run["versions"],
        "funnel": funnel,
        "signs": [sign.to_json() for sign in signs],
        "errors": failures_by_class(stored.path),
        "spent": read_spending(stored.path, run["config"].get("max_attempts", NO_LIMIT))._asdict(),
        "judges": spent_by_judges(stored.path)._asdict(),
    }


def _tasks(run: Mapping[str, Any], funnel: Mapping[str, Any] | None) -> int:
    """Number of tasks of usable rows: those of the funnel, where not all samples are needed."""
    if funnel is None or run["config"].get("until_passed") is None:
        return int(run["dataset"]["rows"] * run["config"]["num_samples"])
    return next(int(step["count"]) for step in funnel["steps"] if step["name"] == "tasks")


def dataset_name(dataset: Mapping[str, Any]) -> str:
    """The dataset as the user gave it, without the directories of this machine.

    What is not JSONL was copied to a file whose name is a digest, which would tell nobody anything.
    """
    source = (dataset.get("source") or {}).get("source") or dataset["path"]
    return str(source) if source.startswith(HUB_PREFIX) else PurePath(source).name


class _Distinct:
    """Distinct values by keys: most records of a run have the same tools."""

    def __init__(self, first: int) -> None:
        """No other part has keys that begin with `first`."""
        self.values: dict[str, Any] = {}
        self._first = first
        self._keys: dict[str | bytes, str] = {}

    def key(self, value: Any) -> str:
        """The key of `value` in `values`."""
        same = value if isinstance(value, str) else exact_json.dumps(value)
        if same not in self._keys:
            self._keys[same] = f"{self._first}-{len(self.values)}"
            self.values[self._keys[same]] = value
        return self._keys[same]


def training_form(
    record: Record,
    own: AuthoredWork | None = None,
    *,
    key_of: Callable[[str], Any],
    style: Style,
    masks: Masks | None = None,
) -> dict[str, Any]:
    """The export row of a record, for `dumps_row`; `own` is that of `read_conversation`.

    Keys: `file` ("training", "partial" or "rejects"), `reason` and `detail` (of a reject, else
    None), `system` (what `key_of` gives for the text of the system turn, which most rows of a run
    share; None for a reject), `turns` (lists of speaker, text and whether it carries loss, without
    the system turn), `given` (number of turns with loss that are from the prompt); with `masks` of
    the dataset also `masked`, the reasons of its masked turns by the number of the turn of `gpt`.

    All turns of `gpt` carry loss, also those from the prompt: trainers mask by speaker.
    """
    routed = route_record(record, own, style=style, render=_visible_turns)
    row = routed.row
    if routed.file == "rejects":
        form = {"reason": row["reason"], "detail": row["detail"], "system": None}
        return {"file": routed.file, **form, "turns": [], "given": 0}
    return {
        "file": routed.file,
        "reason": None,
        "detail": None,
        **row,
        "system": key_of(row["system"]),
        **({} if masks is None else {"masked": _masked_turns(record, masks)}),
    }


def _visible_turns(conversation: Conversation, style: Style) -> dict[str, Any]:
    """`system` (the text), `turns` and `given`."""
    system, *turns = make_turns(conversation, style)
    shown = [(speaker := turn["from"], turn["value"], speaker == "gpt") for turn in turns]
    given = 0
    if conversation.has_other_authors:
        given = sum([has_loss for _, _, has_loss in shown]) - len(conversation.own_turns)
    return {"system": system["value"], "turns": shown, "given": given}


def _masked_turns(record: Record, masks: Masks) -> dict[str, Sequence[str]]:
    try:
        entries = masks.apply(read_conversation(record)).entries
    except ConfigError as error:  # the user's function fails, which the page says at each turn
        return {str(number): [str(error)] for number in range(1, len(record.turns) + 1)}
    turns = (entry for entry in entries if isinstance(entry, Turn))
    return {str(turn.number): turn.masked for turn in turns if turn.masked}


def render_page(meta: dict[str, Any], *, rows: bytes, records: bytes) -> bytes:
    """The page with its data: `rows` and `records` are JSON, `meta` describes the run.

    It loads nothing else but files with data. All text of models, tools and users is data in JSON,
    never markup: scripts insert it as text. The content policy allows only the page's own scripts
    and, if its data is in files beside it, these script files; pictures only as data; no other
    address, frame or form.
    """
    style = read_part("page.css")
    script = join_scripts(sources=read_part("source.js"))
    files = " 'self' file:" if meta["row_pieces"] else ""
    policy = (
        f"default-src 'none'; script-src {_source(script)}{files}; style-src {_source(style)}; "
        "img-src data:; base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; "
        "trusted-types report-files"
    )
    policy_element = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
    data = {
        "meta-data": embed_json(exact_json.dumps(meta)),
        "rows-data": embed_json(rows),
        "records-data": embed_json(records),
    }
    scripts = [
        b'<script type="application/json" id="%s">%s</script>\n' % (name.encode(), content)
        for name, content in data.items()
    ]
    name = _as_text(meta["run_name"])
    parts = {
        "POLICY": policy_element.encode(),
        "TITLE": f"{name} · report".encode(),
        "HOME": name.encode(),
        "STYLE": f"<style>{style}</style>".encode(),
        "SCRIPTS": b"".join(scripts) + f'<script type="module">{script}</script>'.encode(),
    }
    return frame_page(parts)


def embed_json(json: bytes) -> bytes:
    """JSON for use inside a script element: without `<` it cannot end the element."""
    return json.replace(b"<", b"\\u003c")


def _source(content: str) -> str:
    digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def _as_text(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")
