"""Where the solution of a row is, and what of it can be recognized elsewhere."""

from __future__ import annotations

from typing import Any

import pytest

from batch_trajectories.runs.audit.reference import Reference, read_reference

PATCH = """\
diff --git a/pkg/calc.py b/pkg/calc.py
--- a/pkg/calc.py
+++ b/pkg/calc.py
@@ -1,3 +1,3 @@
 def add(a, b):
-    return a - b
+    return a + b

@@ -9,2 +9,1 @@
 last = 1
-unused = 2
diff --git a/new.py b/new.py
new file mode 100644
--- /dev/null
+++ b/new.py
@@ -0,0 +1,1 @@
+new = True
\\ No newline at end of file
"""


def test_a_patch_is_recognized_by_what_it_makes_of_each_file() -> None:
    made = Reference(patch=PATCH).texts()
    added = "def add(a, b):\n    return a + b\n"
    assert made == {
        "pkg/calc.py": ([added], ["    return a + b"]),
        "new.py": (["new = True"], ["new = True"]),
    }
    before = Reference(patch=PATCH, is_reversed=True).texts()
    texts = [added.replace("+", "-"), "last = 1\nunused = 2"]
    assert before == {"pkg/calc.py": (texts, ["    return a - b", "unused = 2"])}


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({}, None),
        ({"solution": "The answer is 42."}, None),
        ({"reference": {}}, None),
        ({"reference": {"patch": "  \n"}}, None),
        ({"solution": {"a.py": "x"}}, Reference(files={"a.py": b"x"})),
        ({"solution_command": "make"}, Reference(command="make")),
        ({"reference": {"patch": "p", "reverse": True}}, Reference("p", is_reversed=True)),
    ],
)
def test_the_columns_of_a_row(columns: dict[str, Any], expected: Reference | None) -> None:
    assert read_reference(columns, inside=False) == expected


def test_the_files_of_a_commit() -> None:
    def change(path: str, content: str | None) -> dict[str, Any]:
        return {"header": {"file": {"path": path}}, "new_file_content": content}

    commit = {"file_diffs": [change("a.py", "new"), change("old.py", None)]}
    found = read_reference({"reference": {"commit": commit}}, inside=True)
    assert found == Reference(files={"a.py": b"new"}, removed=("old.py",))
    with pytest.raises(ValueError, match="a file lacks 'header'"):
        read_reference({"reference": {"commit": {"file_diffs": [{}]}}}, inside=True)
