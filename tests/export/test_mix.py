"""What recipes choose among all conversations, and datasets of several runs."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from batch_trajectories.basics.errors import ConfigError
from batch_trajectories.config.run_config import RunConfig
from batch_trajectories.export.dataset.checking import find_problems
from batch_trajectories.export.dataset.choice import run_limits
from batch_trajectories.export.dataset.directory import export_dataset
from batch_trajectories.export.dataset.runs import Source
from batch_trajectories.export.dataset.splits import JoinedSplits
from batch_trajectories.export.rows.files import Candidate
from batch_trajectories.export.rows.recipe import Recipe, RunShare, load_recipe
from tests.helpers.builders import assistant, record_of, user
from tests.helpers.exporting import export_to_dataset, make_run, rejects, rows
from tests.helpers.running import lines, run, write_rows
from tests.helpers.stored import to_record

QUESTION = "how many sheep does it take to fill the whole of an empty barn by noon"


def answer(text: str, *, question: str = "Go?", passed: bool | None = None) -> dict[str, Any]:
    check = None if passed is None else {"passed": passed, "reward": float(passed)}
    return record_of(user(question), assistant(text), check=check)


def mix(*sources: Source) -> Source:
    first, *others = sources
    return replace(first, others=tuple(others))


def samples(tmp_path: Path, *passed: int, of: int = 4) -> Source:
    """A run with a prompt for each number, of which so many samples passed."""
    records = [
        answer(f"{prompt}.{sample}", passed=sample < count)
        for prompt, count in enumerate(passed)
        for sample in range(of)
    ]
    return make_run(tmp_path, *records, samples=of)


class TestRates:
    def test_prompts_outside_the_band_are_left_out_and_counted(self, tmp_path: Path) -> None:
        source = samples(tmp_path, 0, 1, 2, 4)
        filters = {"pass_rate": [0.25, 0.5], "exact_duplicates": False}
        directory, manifest = export_to_dataset(source, formats="raw", filters=filters)
        kept = Counter(row["prompt_id"] for row in lines(directory / "raw/train.jsonl"))
        assert kept == {"t1": 4, "t2": 4}
        assert manifest["rejected_by_reason"] == {"pass_rate": 8}
        (why, *_) = [x["detail"] for x in lines(directory / "rejects.jsonl") if x["id"] == "t3"]
        assert why == "4 of 4 samples passed"

    def test_failed_samples_count_although_a_filter_leaves_them_out(self, tmp_path: Path) -> None:
        source = samples(tmp_path, 1, 4)
        filters = {"pass_rate": [0.1, 0.9], "require_passed": "judged", "exact_duplicates": False}
        assert [row["id"] for row in rows(source, "raw", filters=filters)] == ["t0"]

    def test_what_the_band_leaves_out_excludes_no_copy(self, tmp_path: Path) -> None:
        records = [answer("A", passed=True), answer("B", passed=True)]
        records += [answer("A", passed=True), answer("C", passed=False)]
        source = make_run(tmp_path, *records, samples=2)
        filters = {"pass_rate": [0.1, 0.9], "exact_duplicates": True}
        assert [row["id"] for row in rows(source, "raw", filters=filters)] == ["t1", "t1#s1"]

    def test_samples_that_stopped_at_a_pass_have_no_biased_rate(self, tmp_path: Path) -> None:
        """With `--until_passed=2` the last sample always passed."""
        source = samples(tmp_path, 2, 2, of=4)  # 2 of 4 by a fixed number
        stopping: Any = {"num_samples": 4, "until_passed": 2}
        config = RunConfig(dataset_file=tmp_path / "p.jsonl", run_name="r", **stopping)
        filters = {"pass_rate": [0.3, 0.4], "exact_duplicates": False}
        assert rows(source, "raw", filters=filters) == []
        assert len(rows(replace(source, config=config), "raw", filters=filters)) == 8

    def test_prompts_without_verdicts_are_left_out(self, tmp_path: Path) -> None:
        source = make_run(tmp_path, answer("A"))
        assert rejects(source, formats="raw", filters={"pass_rate": [0, 1]}) == {"t0": "pass_rate"}

    def test_the_easiest_prompts_come_first(self, tmp_path: Path) -> None:
        source = samples(tmp_path, 1, 4, 0, 3)
        ids = [row["prompt_id"] for row in rows(source, "raw", sort="pass_rate")]
        assert list(dict.fromkeys(ids)) == ["t1", "t3", "t0", "t2"]
        ids = [row["prompt_id"] for row in rows(source, "raw", sort="-pass_rate")]
        assert list(dict.fromkeys(ids)) == ["t2", "t0", "t3", "t1"]


class TestCaps:
    @pytest.fixture
    def source(self, tmp_path: Path) -> Source:
        repos = ["a/x"] * 5 + ["b/y"] * 3 + ["A/X.git"] + [None] * 2
        prompts = [{"repo": repo} if repo else {} for repo in repos]
        return make_run(tmp_path, *(answer(str(n)) for n in range(11)), prompts=prompts)

    def test_a_cap_keeps_so_many_of_each_value(self, source: Source) -> None:
        left_out = rejects(source, formats="raw", filters={"max_per": {"repo": 2}})
        assert Counter(left_out.values()) == {"max_per": 5}
        kept = {f"t{n}" for n in range(11)} - left_out.keys()
        assert {"t9", "t10"} < kept  # they have no repo
        assert len(kept & {"t5", "t6", "t7"}) == 2

    def test_the_seed_draws(self, source: Source) -> None:
        drawn = {
            tuple(rejects(source, formats="raw", seed=seed, filters={"max_per": {"repo": 2}}))
            for seed in (0, 0, 1, 2)
        }
        assert len(drawn) == 3

    def test_metadata_and_ids_are_capped_like_columns(self, tmp_path: Path) -> None:
        source = samples(tmp_path, 1, 1)
        filters = {"max_per": {"id": 3, "model": 5}, "exact_duplicates": False}
        kept = Counter(row["prompt_id"] for row in rows(source, "raw", filters=filters))
        assert sorted(kept.values()) == [2, 3]

    def test_the_rarest_value_balances_the_others(self, source: Source) -> None:
        kept = rows(source, "raw", filters={"balance": "repo"})
        assert Counter(row["row"].get("repo") for row in kept)["b/y"] == 3
        assert len(kept) == 3 + 3 + 2

    def test_a_column_that_no_row_has_is_named(self, source: Source) -> None:
        with pytest.raises(ConfigError, match=r"filters\.max_per\.repoo: no conversation has"):
            rows(source, "raw", filters={"max_per": {"repoo": 2}})

    def test_only_what_makes_rows_is_counted_for_preferences(self, tmp_path: Path) -> None:
        source = samples(tmp_path, 1, 1, 1, of=2)
        filters = {"max_per": {"model": 2}, "require_passed": True}
        _, manifest = export_to_dataset(source, formats="dpo", filters=filters)
        assert manifest["formats"][0]["rows"] == 2
        assert manifest["rejected_by_reason"] == {"max_per": 1}

    def test_the_shortest_come_first(self, tmp_path: Path) -> None:
        source = make_run(tmp_path, answer("x" * 50), answer("x"), answer("x" * 9))
        assert [row["id"] for row in rows(source, "raw", sort="length")] == ["t1", "t2", "t0"]

    def test_a_drawn_order_depends_on_the_seed(self, source: Source) -> None:
        orders = {
            tuple(row["id"] for row in rows(source, "raw", sort="random", seed=seed))
            for seed in (0, 0, 1)
        }
        assert len(orders) == 2


class TestLengths:
    @pytest.fixture
    def student(self, tmp_path: Path) -> Path:
        """A tokenizer of one token per word."""
        tokenizers = pytest.importorskip("tokenizers")
        student = tmp_path / "student"
        student.mkdir()
        tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0}, unk_token="?"))
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
        tokenizer.save(str(student / "tokenizer.json"))
        (student / "chat_template.jinja").write_text(
            "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        )
        return student

    def test_bounds_count_tokens_as_the_template_renders_them(
        self, tmp_path: Path, student: Path
    ) -> None:
        source = make_run(tmp_path, answer("a"), answer("a b c"), answer("a b c d e f"))
        limits = {"tokenizer": str(student), "min_length": 5, "max_length": 7}
        why = rejects(source, formats="hermes", filters=limits)
        assert why == {"t0": "min_length", "t2": "max_length"}
        found = rows(source, "openai", sort="-length", filters={"tokenizer": str(student)})
        assert [row["id"] for row in found] == ["t2", "t1", "t0"]

    def test_bounds_without_a_tokenizer_are_refused(self, tmp_path: Path) -> None:
        source = make_run(tmp_path, answer("a"))
        with pytest.raises(ConfigError, match=r"filters\.max_length: counts tokens; add tokenizer"):
            rows(source, "raw", filters={"max_length": 100})

    def test_a_directory_that_is_no_tokenizer_is_named(self, tmp_path: Path) -> None:
        source = make_run(tmp_path, answer("a"))
        with pytest.raises(ConfigError, match=r"filters\.tokenizer: .* tokenizer\.json"):
            rows(source, "raw", filters={"tokenizer": str(tmp_path), "max_length": 5})


def five_runs(folder: Path) -> list[Source]:
    """Runs with planted copies of conversations, leaks of a benchmark and shared repositories.

    Run n has 20 prompts of its own over repositories n and n + 1, one conversation that each other
    run has, too, one with a question of the benchmark, and one prompt that the next run has with
    another answer and repository.
    """
    runs = []
    for n in range(5):
        records, prompts = [], []
        for k in range(20):
            question = f"Run {n}, question {k}: what is left of it?"
            records.append(answer(f"{n} {k}", question=question))
            prompts.append({"prompt": question, "repo": f"org/repo{(n + k % 2) % 5}"})
        records.append(answer("The same.", question="Copied"))
        prompts.append({"prompt": "Copied", "repo": f"org/copies{n}"})
        records.append(answer("Leaked.", question=f"Tell me {QUESTION}, run {n}."))
        prompts.append({"prompt": f"Tell me {QUESTION}, run {n}.", "repo": f"org/leaks{n}"})
        for shared in (n, (n + 1) % 5):
            records.append(answer(f"Shared {shared}, by run {n}.", question=f"Shared {shared}"))
            prompts.append({"prompt": f"Shared {shared}", "repo": f"org/own{n}"})
        runs.append(make_run(folder, *records, prompts=prompts, name=f"run{n}"))
    return runs


class TestMixes:
    def test_copies_leaks_and_shared_values_of_five_runs(self, tmp_path: Path) -> None:
        write_rows(tmp_path / "bench.jsonl", {"question": QUESTION})
        recipe = Recipe.model_validate(
            {
                "formats": "openai",
                "splits": {"train": 0.5, "test": 0.5},
                "split_by": "repo",
                "filters": {"evaluation_files": [str(tmp_path / "bench.jsonl")]},
            }
        )
        runs = five_runs(tmp_path)
        contents = set()
        for order in (runs, runs[::-1], [*runs[2:], *runs[:2]]):
            out = tmp_path / "out"
            manifest = export_dataset(mix(*order), recipe, out)
            files = sorted(path for path in out.rglob("*") if path.is_file())
            contents.add(tuple((path.relative_to(out), path.read_bytes()) for path in files))
            assert list(find_problems(mix(*order), out)) == []
        assert len(contents) == 1
        assert manifest["tasks"] == 5 * 24
        assert manifest["rejected_by_reason"] == {"evaluation_files": 5, "exact_duplicates": 4}
        copies = [x for x in lines(out / "rejects.jsonl") if x["reason"] == "exact_duplicates"]
        assert [x["run"] for x in copies] == ["run1", "run2", "run3", "run4"]
        splits = {name: lines(out / "openai" / f"{name}.jsonl") for name in ("train", "test")}
        assert all(splits.values())
        for what in (_prompt, _repo):
            train, test = ({what(row) for row in splits[name]} for name in ("train", "test"))
            assert train.isdisjoint(test)
        # Each repository is shared by two runs, and each own one by a chain of shared prompts.
        assert {_repo(row) for name in splits for row in splits[name]} >= {"org/own0", "org/repo4"}
        runs_of_rows = Counter(_metadata(row)["run"] for name in splits for row in splits[name])
        assert runs_of_rows == {one["name"]: one["selected"] for one in manifest["runs"]}

    def test_an_added_run_moves_no_repository(self, tmp_path: Path) -> None:
        """Unless it joins groups."""
        runs = five_runs(tmp_path)
        recipe = Recipe.model_validate(
            {"formats": "raw", "splits": {"train": 0.5, "test": 0.5}, "split_by": "repo"}
        )

        def split_of_repos(*sources: Source) -> dict[str, str]:
            export_dataset(mix(*sources), recipe, tmp_path / "out", replace=True)
            return {
                row["row"]["repo"]: split
                for split in ("train", "test")
                for row in lines(tmp_path / "out/raw" / f"{split}.jsonl")
            }

        before = split_of_repos(runs[0])
        after = split_of_repos(runs[0], runs[2])
        assert before.items() <= after.items()

    def test_weights_and_counts(self, tmp_path: Path) -> None:
        runs = five_runs(tmp_path)[:3]
        shares = {"run0": {"weight": 3}, "run1": {"weight": 1}, "run2": {"count": 4}}
        _, manifest = export_to_dataset(mix(*runs), formats="raw", runs=shares)
        assert [one["selected"] for one in manifest["runs"]] == [24, 8, 4]
        assert manifest["rejected_by_reason"]["runs"] == 36

    def test_what_the_weights_do_not_draw_is_not_called_rejected(self, tmp_path: Path) -> None:
        runs = [one.run_dir for one in five_runs(tmp_path)[:2]]
        recipe = {"formats": ["raw"], "runs": {"run0": {"weight": 3}, "run1": {"weight": 1}}}
        (tmp_path / "mix.yaml").write_text(json.dumps(recipe))
        done = run(tmp_path, "export", *runs, mix="mix.yaml", output=tmp_path / "out")
        assert done.returncode == 0, done.stderr
        first, *rest = done.stdout.splitlines()
        drawn = int(rest[[line.split()[-1] for line in rest].index("runs")].split()[-2])
        assert f"{drawn} not drawn" in first
        assert any(line.split()[:2] == ["not", "drawn"] for line in rest)

    def test_weights_divide_what_the_scarcest_run_allows(self) -> None:
        shares = {"a": RunShare(weight=0.6), "b": RunShare(weight=0.4), "c": RunShare(count=9)}
        assert run_limits(shares, {"a": 300, "b": 1000, "c": 5}) == {"a": 300, "b": 200, "c": 5}
        with pytest.raises(ConfigError, match=r"runs\.b: no conversation of it is left"):
            run_limits(shares, {"a": 300, "b": 0, "c": 5})

    def test_the_same_id_in_two_runs(self, tmp_path: Path) -> None:
        """Samples are compared within a run, so each run has its pair."""
        pair = [answer("Good", passed=True), answer("Bad", passed=False)]
        runs = [make_run(tmp_path, *pair, samples=2, name=name) for name in "ab"]
        _, manifest = export_to_dataset(mix(*runs), formats="dpo")
        assert manifest["formats"][0]["rows"] == 2
        assert [one["selected"] for one in manifest["runs"]] == [2, 2]

    def test_the_card_names_each_run_with_audit_parity_and_license(self, tmp_path: Path) -> None:
        pytest.importorskip("jinja2")
        runs = [make_run(tmp_path, answer(name), name=name) for name in ("plain", "audited")]
        identity = json.loads((runs[1].run_dir / "run.json").read_text())
        identity["dataset"]["source"] = {"only_sound": {"audit": "my_audit", "rows": {"sound": 1}}}
        (runs[1].run_dir / "run.json").write_text(json.dumps(identity))
        share = {"license": "apache-2.0", "prompt_source": "written by us"}
        out, _ = export_to_dataset(mix(*runs), formats="openai", runs={"audited": share})
        card = (out / "README.md").read_text()
        assert (
            "| `audited` | 1 of 1 | apache-2.0 | written by us | `my_audit` | not proved |" in card
        )
        assert "| `plain` | 1 of 1 | not stated | not stated; say where" in card

    def test_mistakes_in_a_mix_are_named(self, tmp_path: Path) -> None:
        file = tmp_path / "mix.yaml"
        for text, reason in {
            "runs: {a: {weight: 1, count: 2}}": r"mix\.yaml:1: runs\.a: weight and count exclude",
            "runs: {a: {wieght: 1}}": r"mix\.yaml:1: runs\.a\.wieght: unknown key; did you mean",
            "filters: {pass_rate: [0.9, 0.1]}": r"filters: pass_rate: must be \[LOWEST, HIGHEST",
        }.items():
            file.write_text(text)
            with pytest.raises(ConfigError, match=reason):
                load_recipe(file, {})


def test_every_order_of_joins_gives_the_same_groups(tmp_path: Path) -> None:
    """A chain of prompts and repositories, in whatever order its links come."""
    links = [("p1", "a"), ("p1", "b"), ("p2", "b"), ("p2", "c"), ("p3", "d")]
    drawn = set()
    for order in itertools.permutations(range(5), 5):
        splits = JoinedSplits({"train": 0.5, "test": 0.5}, ["repo"], seed=0)
        loaded = [
            Candidate(
                to_record({"id": f"{n}", "row": {"prompt": links[n][0], "repo": links[n][1]}})
            )
            for n in order
        ]
        for one in loaded:
            splits.join(one)
        places = dict(zip(order, map(splits.choose, loaded), strict=True))
        assert len({places[n] for n in range(4)}) == 1
        drawn.add(tuple(places[n] for n in range(5)))
    assert len(drawn) == 1


def _metadata(row: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(row["metadata"])
    return found


def _prompt(row: dict[str, Any]) -> str:
    return str(next(m["content"] for m in row["messages"] if m["role"] == "user"))


def _repo(row: dict[str, Any]) -> str:
    return str(_metadata(row)["columns"]["repo"])
