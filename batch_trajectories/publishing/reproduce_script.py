"""The script of a publication that starts its job again: the same text in every publication.

Nothing of the run is in it, so `verify` can tell whether somebody has changed the script.
"""

from __future__ import annotations

SCRIPT_NAME = "reproduce.sh"

_SCRIPT = """\
#!/bin/sh
# Makes this dataset again with your own key, and compares the rows. If it was stopped, the same
# command continues.
#
#   OPENAI_API_KEY=... sh reproduce.sh [OPTIONS OF THE RUN]
#
# It needs batch-trajectories; `batch-runner verify DIRECTORY` names the version, and the options
# that you have to give. WORK is the directory for all that it writes (default: this directory with
# .again at its end), RUNNER the command of the program (default: batch-runner). Rows of models that
# sample differ.
set -eu
here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd)
work=${WORK:-$here.again}
runner=${RUNNER:-batch-runner}
$runner verify "$here" --given="$*"
mkdir -p -- "$work"
cp -- "$here/recipe.yaml" "$work/recipe.yaml"
$runner --config="$here/run.yaml" --output_dir="$work" "$@" || test $? -eq 1
for file in "$work"/*/run.json; do run=${file%/run.json}; done
$runner publish "$run" "$work/published" --recipe="$work/recipe.yaml" \\
    --prompts=PROMPTS --replace
$runner verify "$here" --same_as="$work/published"
"""


def reproduce_script(prompts: str) -> bytes:
    """The script of a publication with this value of `--prompts`."""
    return _SCRIPT.replace("PROMPTS --replace", f"{prompts} --replace").encode()
