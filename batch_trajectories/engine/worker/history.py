"""Removes from a repository what comes after the commit where its task begins.

An image often holds the commit that solves its task: on a branch or tag, in the reflog, in a stash,
or as an object that nothing names. Before the first turn all that does not lead to `base_commit`
is removed from the repository of the workspace and its submodules, and it is proved to be gone.

The current branch keeps its name, and files stay as they are. Where it is not at `base_commit`, as
after a commit of what set up the image, it becomes one commit on top of it, with the tracked files
as they are. Where there is no such commit, this is the only one.
"""

from __future__ import annotations

from batch_trajectories.basics.errors import ToolError
from batch_trajectories.basics.text import clip
from batch_trajectories.engine.worker.workspace_setup import SetupFailed
from toolsets.context import ToolContext
from toolsets.sandbox.base import ExecResult

_TIMEOUT_S = 1800.0
_MAX_OUTPUT_CHARS = 500
_KEEP = "`keep_history: true` leaves the history as it is"

# Nothing but git, sh and coreutils, of any age: an image may have no more. Git says by itself what
# is wrong with a repository. `safe.directory`: files may belong to another user than commands.
_PRELUDE = r"""
set -eu
umask 022
unset GIT_DIR GIT_WORK_TREE GIT_INDEX_FILE GIT_OBJECT_DIRECTORY GIT_COMMON_DIR
unset GIT_ALTERNATE_OBJECT_DIRECTORIES
export LC_ALL=C GIT_NO_REPLACE_OBJECTS=1 GIT_GRAFT_FILE=/dev/null GIT_CONFIG_COUNT=6
export GIT_CONFIG_KEY_0=safe.directory GIT_CONFIG_VALUE_0='*'
export GIT_CONFIG_KEY_1=core.hooksPath GIT_CONFIG_VALUE_1=/dev/null
export GIT_CONFIG_KEY_2=core.fsmonitor GIT_CONFIG_VALUE_2=false
export GIT_CONFIG_KEY_3=core.checkStat GIT_CONFIG_VALUE_3=minimal
export GIT_CONFIG_KEY_4=core.quotePath GIT_CONFIG_VALUE_4=false
export GIT_CONFIG_KEY_5=core.logAllRefUpdates GIT_CONFIG_VALUE_5=false

fail() { echo "$1" >&2; exit 1; }

if ! said=$(git rev-parse --is-inside-work-tree 2>&1); then
    # Perhaps one that another program can read, or that a command can repair.
    at=$PWD
    while :; do
        [ ! -e "${at%/}/.git" ] || fail "git cannot read ${at%/}/.git: $said"
        [ -n "${at%/}" ] || exit 0
        at=${at%/*}
    done
fi
[ "$said" = true ] || fail "it has no files of its own (bare)"

# Sets what the other functions use, for the repository of the working directory.
look() {
    top=$(git rev-parse --show-toplevel)
    cd "$top"
    own=$(git rev-parse --absolute-git-dir)
    common=$(git rev-parse --git-common-dir)
    [ "$own" = "$(cd "$common" && pwd -P)" ] || fail "$top is a linked worktree of $common"
    head=$(git rev-parse -q --verify 'HEAD^{commit}' || :)
    start=
    if [ -n "$1" ]; then
        start=$(git rev-parse -q --verify "$1^{commit}" 2>/dev/null || :)
    fi
}

# The commit and the path of each submodule that has a repository.
submodules() {
    listed=$(git ls-files -s)
    # Shells read a pipe byte by byte, and most repositories have none.
    case "
$listed" in *"
160000 "*) ;; *) return 0 ;; esac
    printf '%s\n' "$listed" | while IFS= read -r entry; do
        case $entry in
            160000*'	"'*) fail "a submodule with the name ${entry#*	}" ;;
            160000*)
                path=${entry#*	}
                entry=${entry#* }
                if [ -e "$path/.git" ]; then echo "${entry%% *} $path"; fi
                ;;
        esac
    done
}
"""

_PROVE = r"""
prove() (
    cd "$1"
    look "$2"
    [ -n "$head" ] || fail "$top: HEAD names no commit"
    if [ "$head" != "$start" ]; then
        parents=$(git rev-list --parents -n 1 "$head")
        parents=${parents#"$head"}
        [ "${parents# }" = "$start" ] || fail "$top: HEAD is $head, not base_commit"
        git diff --quiet --ignore-submodules=all HEAD || fail "$top: HEAD has other files"
    fi
    case $(git count-objects -v) in *alternate:*) fail "$top: there are alternates" ;; esac
    [ ! -e "$own/worktrees" ] || fail "$top: there are other worktrees"
    all=$(git cat-file --batch-all-objects --batch-check='%(objectname)' | wc -l)
    reachable=$(git rev-list --objects --missing=allow-any "$head" | wc -l)
    [ "$all" -eq "$reachable" ] ||
        fail "$top: $((all - reachable)) of $((all)) objects are not in the history of base_commit"
    modules=$(submodules)
    while read -r commit path; do
        if [ -n "$path" ]; then prove "$path" "$commit"; fi
    done <<END
$modules
END
)
prove . "$1"
"""

_REMOVE = r"""
by_setup() {
    date=$(git log -1 --format=%ct "$1" 2>/dev/null || echo 946684800)
    shift
    GIT_AUTHOR_NAME=setup GIT_AUTHOR_EMAIL=setup@localhost GIT_AUTHOR_DATE="$date +0000" \
        GIT_COMMITTER_NAME=setup GIT_COMMITTER_EMAIL=setup@localhost \
        GIT_COMMITTER_DATE="$date +0000" git commit-tree "$@"
}

# Removes the repositories in a directory that are none of $kept.
remove_others() {
    for found in "$1"/*; do
        if [ -f "$found/HEAD" ]; then
            case $kept in *"|$found|"*) ;; *) rm -rf "$found" ;; esac
        elif [ -d "$found" ]; then
            remove_others "$found"
        fi
    done
}

remove() (
    cd "$1"
    look "$2"
    all=$3
    new="$own/making"
    rm -rf "$new"
    mkdir -p "$new/pack"
    if [ -z "$all" ]; then
        start=$head
    elif [ "$head" != "$start" ] || [ -z "$head" ]; then
        if [ -f "$own/index" ]; then cp -p "$own/index" "$new/index"; fi
        tree=$(
            export GIT_INDEX_FILE="$new/index"
            git add -u
            git write-tree
        )
        if [ -z "$start" ] || [ "$tree" != "$(git rev-parse "$start^{tree}")" ]; then
            start=$(by_setup "$head" "$tree" ${start:+-p "$start"} -m Start)
        fi
    fi
    # What stays, written down before anything goes. A tag becomes the name of its commit.
    git for-each-ref --merged "$start" \
        --format='%(objecttype) %(objectname) %(*objecttype) %(*objectname) %(refname)' refs/tags |
        while read -r kind object inner target name; do
            case $kind:$inner in
                commit:*) echo "create $inner $object" ;;
                tag:commit) echo "create $name $target" ;;
            esac
        done >"$new/tags"
    : >"$new/shallow"
    if [ -f "$own/shallow" ]; then
        while read -r commit; do
            if git merge-base --is-ancestor "$commit" "$start" 2>/dev/null; then echo "$commit"; fi
        done <"$own/shallow" >"$new/shallow"
    fi
    branch=$(git symbolic-ref -q HEAD || :)
    kept='|'
    submodules >"$new/submodules"
    while read -r commit path; do
        remove "$path" "$commit" "$all"
        kept="$kept$(git -C "$path" rev-parse --absolute-git-dir)|"
    done <"$new/submodules"
    if [ -d "$own/worktrees" ]; then
        git worktree list --porcelain | {
            read -r line  # the first is this one
            while IFS= read -r line; do
                case $line in 'worktree '*) rm -rf "${line#worktree }" ;; esac
            done
        }
    fi
    git count-objects -v | while IFS= read -r line; do
        case $line in 'alternate: '*) echo "${line#alternate: }" ;; esac
    done >"$new/alternates"
    if [ -n "$all" ]; then
        # Deltas are used as they are, and a file stays below the limit of a sandbox.
        echo "$start" | git pack-objects --revs --quiet --delta-base-offset --window=0 \
            --missing=allow-any --max-pack-size=256m "$new/pack/pack" >/dev/null
        rm -rf "$own/objects"
        mkdir "$own/objects" "$own/objects/info"
        mv "$new/pack" "$own/objects/pack"
        while IFS= read -r path; do rm -rf "$path"; done <"$new/alternates"
    fi
    set -- "$own/info/refs" "$own/info/grafts"
    for path in "$own"/* "$own"/.[!.]*; do
        case ${path##*/} in
            HEAD | config | config.worktree | description | hooks | index | sharedindex.* | info) ;;
            annex | making | modules | objects) ;;
            *) set -- "$@" "$path" ;;
        esac
    done
    rm -rf "$@"
    if [ -d "$own/modules" ]; then remove_others "$own/modules"; fi
    if [ -s "$new/shallow" ]; then mv "$new/shallow" "$own/shallow"; fi
    mkdir "$own/refs"
    if [ -n "$branch" ]; then
        git update-ref "$branch" "$start"
    else
        git update-ref --no-deref HEAD "$start"
    fi
    if [ -s "$new/tags" ]; then git update-ref --stdin <"$new/tags"; fi
    if [ -f "$new/index" ]; then
        mv "$new/index" "$own/index"
    elif ! git diff-index --cached --quiet "$start"; then
        git read-tree "$start"  # what was staged is in the files
    fi
    git config --local --name-only --get-regexp '^(remote|branch)\.|^extensions\.partialclone$' |
        while IFS= read -r key; do
            case $key in
                extensions.*) git config --local --unset "$key" || : ;;
                *) git config --local --remove-section "${key%.*}" 2>/dev/null || : ;;
            esac
        done
    rm -rf "$new"
)
remove . "$1" "$2"
"""


async def remove_history(context: ToolContext, base_commit: str) -> None:
    """Remove what does not lead to a commit; prove that it is gone. Raises `SetupFailed`.

    `base_commit` is a commit as git names one; without such a commit no history is left. Does
    nothing where the workspace is in no repository.
    """
    must_go = await history_problem(context, base_commit) is not None
    # Objects that need not go are not copied: they stay in the image, which conversations share.
    result = await _run(context, _REMOVE, base_commit, "all" if must_go else "")
    if result.exit_code != 0:
        raise SetupFailed(f"`base_commit`: the history cannot be removed: {_why(result)}; {_KEEP}")
    if must_go and (left := await history_problem(context, base_commit)) is not None:
        raise SetupFailed(f"`base_commit`: history is left: {left}; {_KEEP}")


async def history_problem(context: ToolContext, base_commit: str) -> str | None:
    """A description of what the repository holds besides a commit's history; None if nothing.

    None is proved: every object of the repository and of its submodules is reachable from HEAD,
    which is `base_commit` or one commit after it. Raises `SetupFailed`.
    """
    result = await _run(context, _PROVE, base_commit)
    return None if result.exit_code == 0 else _why(result)


async def _run(context: ToolContext, script: str, *arguments: str) -> ExecResult:
    if context.sandbox is None:
        raise SetupFailed("there is no sandbox to run commands in")
    argv = ["sh", "-c", _PRELUDE + script, "sh", *arguments]
    try:
        return await context.sandbox.exec(argv, timeout_s=_TIMEOUT_S)
    except ToolError as error:
        raise SetupFailed(f"`base_commit`: {error}") from error


def _why(result: ExecResult) -> str:
    if result.timed_out:
        return f"it took longer than {result.duration_s:.0f} s (see --command_timeout_s)"
    output = (result.stderr or result.stdout).strip()
    return clip(output, max_chars=_MAX_OUTPUT_CHARS) or f"exit code {result.exit_code}"
