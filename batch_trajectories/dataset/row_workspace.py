"""Columns of a row about its workspace: the image, how to work in it, its set-up, and the check."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo

from batch_trajectories.basics.text import clip
from batch_trajectories.dataset.columns import (
    ClosedObject,
    Directory,
    FilePath,
    Files,
    Flag,
    ImageName,
    ImagePath,
    Limits,
    RowLimits,
    Seconds,
    Text,
    Texts,
    User,
    ValuePermissions,
    Variables,
    absolute_path,
    column_names,
    explain_mistakes,
    object_reader,
    objects_reader,
    read_group,
    read_value,
    to_list,
)
from toolsets.sandbox.base import ImageSpec

IMAGE_COLUMNS = ("docker_image", "image", "image_name")
"""Columns that may name the image of a row. The first one that a row has counts."""


def _hidden_paths(raw: Any) -> Any:
    paths = [absolute_path(path) for path in raw] if isinstance(raw, list) else None
    return None if paths is None or "/" in paths else paths


@dataclass(frozen=True, slots=True)
class InsideColumns:
    """Columns about work in an image, read only if the workspace is a directory of the image."""

    workdir: ImagePath | None = None
    """The directory of the image that is the workspace; None: as the image says."""
    user: User | None = None
    """The user that runs commands; None: as the image says."""
    env: Variables = field(default_factory=dict)
    """Variables to set, besides those of the image."""
    network: Flag = True
    """False: no network, even if the run allows it. The column cannot allow more than the run."""
    limits: Limits = field(default_factory=RowLimits)
    """Limits of the row, which only lower those of the run."""
    hide: Annotated[
        tuple[str, ...],
        explain_mistakes(
            "must be a list of absolute paths of the image, without `..`", _hidden_paths
        ),
    ] = ()
    """Paths of the image that are hidden until the check."""


def read_image(
    columns: Mapping[str, Any], inside: InsideColumns | None, *, network: bool
) -> ImageSpec | None:
    """The image of a row, None if it names none. Raises `ValueError` with the reason.

    `own`: how to work in it; None if the workspace is a directory of this machine. `network`: the
    run allows the network.
    """
    name = next((name for name in IMAGE_COLUMNS if columns.get(name) is not None), None)
    if name is None:
        return None
    reference = read_value(ImageName, columns[name], name)
    if inside is None:
        return ImageSpec(reference)
    return ImageSpec(
        reference,
        workdir=inside.workdir,
        user=inside.user,
        env=inside.env,
        network=network and inside.network,
    )


def image_columns(columns: Mapping[str, Any]) -> list[str]:
    """The columns that decide the image of a row: the one that names it, and all before it."""
    place = next((n for n, name in enumerate(IMAGE_COLUMNS) if columns.get(name) is not None), 1)
    return list(IMAGE_COLUMNS[: max(2, place + 1)])


def count_requests(largest: dict[str, int], columns: Mapping[str, Any]) -> None:
    """Add to `largest` the demands of a row that the run may refuse.

    `network`, `check.network` and `artifacts` count rows. Keys of `limits` are the largest value
    that any row has; `limits.cpus` is rounded up.
    """
    check = columns.get("check")
    wishes = {"network": columns, "check.network": check if isinstance(check, dict) else {}}
    for name, place in wishes.items():
        if place.get("network") is True:
            largest[name] = largest.get(name, 0) + 1
    if columns.get("artifacts") is True:
        largest["artifacts"] = largest.get("artifacts", 0) + 1
    limits = columns.get("limits")
    sizes = {} if limits is None else asdict(read_value(Limits, limits, "limits"))
    for name, size in sizes.items():
        if size is not None:
            largest[f"limits.{name}"] = max(math.ceil(size), largest.get(f"limits.{name}", 0))


CheckPlace = Literal["same", "fresh"]
"""The place where a check runs; a check with an image of its own has none."""

PYTHON_FILES = (
    "conftest.py",
    "pytest.ini",
    ".pytest.ini",
    "pytest.toml",
    ".pytest.toml",
    "pyproject.toml",
    "tox.ini",
    "setup.cfg",
    "sitecustomize.py",
    "usercustomize.py",
    "*.pth",
    "*.egg-info/*",
    ".venv/*",
    "venv/*",
)
"""Files that pytest or Python reads by itself, and that can make tests report success."""


def _check_pattern(text: str) -> str:
    import regex

    shown = clip(repr(text), max_chars=200)
    try:
        groups = regex.compile(text).groupindex.keys()
    except regex.error as error:
        raise ValueError(f"{shown} is not a regular expression: {error}") from error
    if not {"name", "status"} <= groups:
        raise ValueError(f"{shown} lacks the group (?P<name>…) or (?P<status>…)")
    return text


def _check_patterns(patterns: tuple[str, ...]) -> tuple[str, ...]:
    if not patterns:
        raise ValueError("is missing: how a line of output names a test and its status")
    return tuple(map(_check_pattern, patterns))


def _require_files(raw: Any) -> list[Any]:
    if raw == []:
        raise ValueError("is an empty list; leave it out, or name a file")
    return to_list(raw)


def _refuse_blank(reason: str) -> AfterValidator:
    def read_text(text: str) -> str:
        if not text.strip():
            raise ValueError(reason)
        return text

    return AfterValidator(read_text)


def _require_image(raw: Any, info: ValidationInfo[ValuePermissions]) -> Any:
    if not info.context.in_image:
        raise ValueError("needs --workspace=image")
    return raw


NEEDS_IMAGE = BeforeValidator(_require_image)
"""Refuses a key unless the workspace is in an image: elsewhere a check has no such choice."""


def _refuse_two_places(image: str, info: ValidationInfo[ValuePermissions]) -> str:
    if (where := info.data.get("where")) is not None:
        raise ValueError(f"does not go with `in: {where}`: leave one of them out")
    return image


def _require_own_image(raw: Any, info: ValidationInfo[ValuePermissions]) -> Any:
    if info.data.get("image") is None:
        raise ValueError("needs `check.image`: the image that it is for")
    return raw


NEEDS_OWN_IMAGE = BeforeValidator(_require_own_image)
"""Refuses a key unless the check has an image of its own."""


def _check_artifacts(
    artifacts: tuple[Artifact, ...], info: ValidationInfo[ValuePermissions]
) -> tuple[Artifact, ...]:
    if artifacts:
        _require_image(artifacts, info)
        _require_own_image(artifacts, info)
    elif info.data.get("image") is not None:
        raise ValueError("is missing: what the image gets of the workspace")
    return artifacts


@dataclass(frozen=True, slots=True)
class Outcomes(ClosedObject):
    """The results of tests that the output of a check's command must show."""

    log: FilePath | None = None
    """The file that holds the output; None: standard output and error of the command."""
    must_pass: Annotated[Texts, Field(alias="pass")] = ()
    """Names of tests that must have a status of `passed`; the key `pass`."""
    passed: Texts = ("PASSED", "XFAIL")
    expected: (
        Annotated[
            dict[str, Text], explain_mistakes("must be an object that maps tests to their status")
        ]
        | None
    ) = None
    """The status of each test that ran; no other tests may have run."""
    patterns: Annotated[Texts, AfterValidator(_check_patterns), Field(validate_default=True)] = ()
    """Regular expressions with the groups `name` and `status`, searched in every line."""


@dataclass(frozen=True, slots=True)
class Artifact(ClosedObject):
    """A file or directory of the workspace that a check in another image gets."""

    path: FilePath
    exclude: Texts = ()
    """Patterns of files in the directory to leave out, as those of `tar --exclude`."""


@dataclass(frozen=True, slots=True)
class Collect(ClosedObject):
    """A command that runs before a check, where the model worked. Its exit code does not count."""

    command: Annotated[Text, _refuse_blank("is missing"), Field(validate_default=True)] = ""
    timeout_s: Seconds | None = None


def _read_outcomes(raw: Any) -> Any:
    if isinstance(raw, dict) and bool(raw.get("pass")) == bool(raw.get("expected")):
        raise ValueError("needs the tests in `pass` or in `expected`, and not in both")
    return object_reader(Outcomes)(raw)


@dataclass(frozen=True, slots=True)
class Check(ClosedObject):
    """The check of a workspace. A text stands for an object with only `command`."""

    command: Annotated[Text, _refuse_blank("is empty, so every conversation would pass")]
    """The command that judges. Exit code 0 passes, unless `reward_file` or `tests` is given."""
    files: Files = field(default_factory=dict)
    """Files that are written when the conversation has ended, so the model never sees them."""
    reward_files: Annotated[
        tuple[FilePath, ...], BeforeValidator(_require_files), Field(alias="reward_file")
    ] = ()
    """A path or a list of paths; the first that the command wrote holds the reward. The key
    `reward_file`."""
    tests: (
        Annotated[
            Outcomes,
            explain_mistakes(
                f"must be an object with {', '.join(sorted(column_names(Outcomes)))}",
                _read_outcomes,
            ),
        ]
        | None
    ) = None
    """The results of tests that the command must print."""
    timeout_s: Seconds | None = None
    """Time limit of the command; None: --command_timeout_s."""
    env: Variables = field(default_factory=dict)
    """Variables for the command, besides those of the sandbox."""
    where: Annotated[
        CheckPlace | None,
        explain_mistakes("must be same or fresh (got {})"),
        NEEDS_IMAGE,
        Field(alias="in"),
    ] = None
    """`same`: the workspace as the model left it; `fresh`: the image with only the diff. The key
    `in`. None if there is no image, or the check has its own."""
    user: Annotated[User, NEEDS_IMAGE] | None = None
    """The user that runs the check; None: the user of the row."""
    network: Annotated[Flag, NEEDS_IMAGE] = False
    """True: the check needs the network, which --check_network allows."""
    from_image: Annotated[
        Texts, BeforeValidator(lambda raw: PYTHON_FILES if raw == "python" else raw), NEEDS_IMAGE
    ] = ()
    """Patterns of files that a fresh check takes from the image, whatever the diff says: a name,
    or a path in the repository with `/`; `*` stands for any characters. `python` stands for
    `PYTHON_FILES`."""
    image: Annotated[ImageName, AfterValidator(_refuse_two_places), NEEDS_IMAGE] | None = None
    """The image that the check runs in, with only the `artifacts` of the workspace; None: that of
    the conversation."""
    artifacts: Annotated[
        tuple[Artifact, ...],
        explain_mistakes(
            "must be a list of paths, or of {path, exclude}", objects_reader(Artifact, "path")
        ),
        AfterValidator(_check_artifacts),
        Field(validate_default=True),
    ] = ()
    """Files of the workspace that `image` gets: paths, or {path, exclude: [PATTERN, ...]}. Missing
    ones are left out."""
    collect: Annotated[
        tuple[Collect, ...],
        explain_mistakes(
            "must be commands, or {command, timeout_s}", objects_reader(Collect, "command")
        ),
        NEEDS_IMAGE,
    ] = ()
    """Commands, or {command, timeout_s}, that run first, where the model worked."""
    limits: Annotated[Limits, NEEDS_OWN_IMAGE, NEEDS_IMAGE] | None = None
    """Limits of the container of `image`; None: those of the row."""
    workdir: Annotated[ImagePath, NEEDS_OWN_IMAGE, NEEDS_IMAGE] | None = None
    """The directory of `image` where the command runs; None: as the image says."""

    @property
    def image_spec(self) -> ImageSpec | None:
        """The check's own image; None if it runs in that of the conversation."""
        return None if self.image is None else ImageSpec(self.image, workdir=self.workdir)


CheckColumn = Annotated[
    Check,
    explain_mistakes(
        "must be a command, or an object with `command` and any of "
        + ", ".join(f"`{name}`" for name in sorted({*column_names(Check)} - {"command"})),
        object_reader(Check, "command"),
    ),
]
"""The value of the column `check`. A text stands for an object with only `command`."""


@dataclass(frozen=True, slots=True)
class SetupColumns:
    """Columns that set up and judge the workspace of a row."""

    files: Files = field(default_factory=dict)
    """Files that are written before the conversation."""
    commands: Annotated[
        tuple[Text, ...],
        explain_mistakes(
            "must be a command or a list of commands", lambda raw: to_list(raw) if raw else []
        ),
        Field(alias="setup"),
    ] = ()
    """A command or a list of them, run in the workspace before the conversation."""
    start_dir: Annotated[Directory, Field(alias="cwd")] = "."
    """The directory of the workspace where shells start."""
    check: CheckColumn | None = None
    """The check of the workspace; None: nothing judges it."""


@dataclass(frozen=True, slots=True)
class HistoryColumns:
    """Columns that limit the history of the repository in an image.

    They are not part of a row's identity, because they change what the model could see, not its
    task.
    """

    base_commit: (
        Annotated[
            Text,
            # No name of a commit may look like an option of git.
            Field(pattern=r"^([^-\s]\S*)?$"),
            explain_mistakes("{} is not a commit as git names one"),
        ]
        | None
    ) = None
    """Only the history of this commit stays; "": nothing stays; None: all of it."""
    keep_history: Flag = False
    """True: all of the history stays, whatever `base_commit` says."""


@dataclass(frozen=True, slots=True)
class RowSetup(SetupColumns):
    """The set-up of the workspace of one row."""

    hidden: tuple[str, ...] = ()
    """Paths of the image that are hidden until the check."""
    base_commit: str | None = None
    """The commit whose history stays, as git names one; "": no history; None: all of it."""


def read_row_setup(
    columns: Mapping[str, Any],
    image: InsideColumns | None = None,
    *,
    check_in: CheckPlace = "same",
    check_network: bool = False,
    variables: Collection[str] = (),
) -> RowSetup:
    """Read the columns of a row. Raises `ValueError` with the reason if they are invalid.

    `image`: how to work in the row's image, if the workspace is a directory of it. `check_in`:
    the place of checks that do not name one. `check_network`: the run allows checks the network.
    `variables`: the variables of this machine that rows may name.
    """
    setup = read_group(
        SetupColumns, columns, ValuePermissions(in_image=image is not None, variables=variables)
    )
    check = setup.check
    if check is not None and check.network and not check_network:
        check = replace(check, network=False)
    base_commit = None
    if image is not None:
        history = read_group(HistoryColumns, columns)
        base_commit = None if history.keep_history else history.base_commit
        if check is not None and check.image is None and check.where is None:
            check = replace(check, where=check_in)
        if image.hide and check is not None and check.where == "same":
            raise ValueError(
                "`hide`: what is hidden is there again only in a fresh check: --check_in=fresh"
            )
    return RowSetup(
        files=setup.files,
        commands=setup.commands,
        start_dir=setup.start_dir,
        check=check,
        hidden=() if image is None else image.hide,
        base_commit=base_commit,
    )
