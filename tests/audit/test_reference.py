"""Where the solution of a row is, and what of it can be recognized elsewhere."""

from __future__ import annotations

from typing import Any

import pytest

from batch_trajectories.audit.leaks import reveals_answer
from batch_trajectories.audit.reference import Reference, read_reference

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


@pytest.mark.parametrize(
    ("prompt", "expected", "is_said"),
    [
        ("The capital of France is Paris. What is the capital of France?", "Paris", True),
        ("Reply with the word Xylophone, please.", "xylophone", True),
        ("What is 6 * 7? (Answer key: 42)", "42", True),
        ("What is 6 * 7?\n#### 42", "42", True),
        (r"Show that it is \boxed{42}.", "42", True),
        ("Q: six times seven <answer> 42 </answer>", "42", True),
        ("The expected output is [1, 2].", "[1, 2]", True),
        ("Reply with 7 and nothing else. What is 3 + 4? Reply with: 7", "7", True),
        ("Your order number is 90210. Which is it?", "90210", True),
        ("It was written by\nAda   Lovelace. Who wrote it?", "Ada Lovelace", True),
        ("What is 6 * 7?", "42", False),
        ("A farmer has 42 cows and sells none. How many are left?", "42", False),
        ("Is a whale a fish or a mammal?", "mammal", False),
        ("Is a whale a mammal/fish?", "mammal", False),
        ("Which is a mammal?\nA) whale\nB) herring", "whale", False),
        ("Choose the mammal: whale, herring, cod.", "whale", False),
        ("Is it true or false that 2 > 1?", "true", False),
        ("Parisian food is what?", "Paris", False),
        ("Is the answer B?", "B", False),
        ("Say nothing.", " ", False),
    ],
)
def test_a_prompt_that_holds_its_expected_answer(prompt: str, expected: str, is_said: bool) -> None:
    assert reveals_answer(prompt, expected) is is_said


def test_the_files_of_a_commit() -> None:
    def change(path: str, content: str | None) -> dict[str, Any]:
        return {"header": {"file": {"path": path}}, "new_file_content": content}

    commit = {"file_diffs": [change("a.py", "new"), change("old.py", None)]}
    found = read_reference({"reference": {"commit": commit}}, inside=True)
    assert found == Reference(files={"a.py": b"new"}, removed=("old.py",))
    with pytest.raises(ValueError, match="a file lacks 'header'"):
        read_reference({"reference": {"commit": {"file_diffs": [{}]}}}, inside=True)
