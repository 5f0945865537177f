# SPDX-License-Identifier: MIT
"""The study's own parts, on a random model and texts that are here: nothing is downloaded."""

import json
import re
import zipfile

import numpy as np
import pytest
import sparseattn as sa

pytest.importorskip("torch")
import choices  # noqa: E402
import corpus  # noqa: E402
import lines  # noqa: E402
import patterns  # noqa: E402
import run  # noqa: E402
import small  # noqa: E402
import stages  # noqa: E402
import study  # noqa: E402
import tasks  # noqa: E402
import torch  # noqa: E402

TOKENS, BUDGET = 512, 224


@pytest.fixture(scope="module")
def text():
    source = small.documents()[0].text
    return patterns.Text(small.Bytes(), small.Bytes().encode(source).ids[:TOKENS])


@pytest.fixture(scope="module")
def operands():
    return torch.from_numpy(np.random.default_rng(0).standard_normal((2, TOKENS, 3, 16), dtype=np.float32))


# ---- patterns ----


def keys_of(pattern, choose, operands):
    """bool [heads or 1, tokens, tokens]"""
    if choose is None:
        return pattern.to_mask(TOKENS)[0]
    lists = choose(*operands).numpy()
    assert lists.shape[2] <= choose.places
    keep = np.zeros((lists.shape[1], TOKENS, TOKENS), bool)
    for head, row in np.ndindex(keep.shape[:2]):
        listed = lists[row, head][lists[row, head] >= 0]
        assert len(set(listed)) == len(listed)  # a key listed twice would count twice
        keep[head, row, listed] = True
    return keep


@pytest.mark.parametrize("name", patterns.NAMES)
def test_every_row_spends_the_budget_and_sees_no_future(name, text, operands):
    keep = keys_of(*patterns.make(name, text, BUDGET), operands)
    assert not (keep & ~np.tri(TOKENS, dtype=bool)).any()
    assert (keep.sum(axis=2) == np.minimum(np.arange(TOKENS) + 1, BUDGET)).all()
    if name not in ("oracle", "window"):
        assert keep[:, patterns.SINKS :, : patterns.SINKS].all()
        assert all(keep[:, row, row - 63 : row + 1].all() for row in range(63, TOKENS, 50))


@pytest.mark.parametrize("name", [name for name in patterns.STATIC if name not in ("strided", "bigbird")])
def test_rows_depend_on_no_later_token(name, text):
    whole = patterns.make(name, text, BUDGET)[0].to_mask(TOKENS)[0, 0]
    for tokens in (300, 437):
        cut = patterns.Text(small.Bytes(), text.ids[:tokens])
        begun = patterns.make(name, cut, BUDGET)[0].to_mask(tokens)[0, 0]
        np.testing.assert_array_equal(begun, whole[:tokens, :tokens])


@pytest.mark.parametrize("block", [16, 64])
def test_blocks_of_xref_are_those_that_most_links_lead_to(block, text):
    linked = patterns.xref(text, BUDGET).to_mask(TOKENS)[0, 0]
    made = patterns.xref_blocks(text, BUDGET, block).to_mask(TOKENS)[0, 0]
    seen = 0
    for row in range(BUDGET + 16, TOKENS, 7):
        window = row - next(back for back in range(row) if not linked[row, row - back])
        far = [key for key in np.flatnonzero(linked[row]) if patterns.SINKS <= key < window]
        held = {first: sum(first <= key < first + block for key in far) for first in range(0, TOKENS, block)}
        best = sorted((count, first) for first, count in held.items() if count)[-(128 // block) :]
        assert all(made[row, max(first, patterns.SINKS) : min(first + block, row + 1)].all() for _, first in best)
        seen += len(best)
    assert seen > 30


def test_a_definition_is_none_before_its_line_ends():
    ids = small.Bytes().encode("def one():\n    return 11\n\n" + "y = 2\n" * 40 + "one()\ndef two():\n    one()\n").ids
    whole = patterns.call_graph(patterns.Text(small.Bytes(), ids), 144).to_mask(len(ids))[0, 0]
    for tokens in range(len(ids) - 30, len(ids)):
        cut = patterns.call_graph(patterns.Text(small.Bytes(), ids[:tokens]), 144).to_mask(tokens)[0, 0]
        np.testing.assert_array_equal(cut, whole[:tokens, :tokens])


def test_lines_are_those_of_the_text(text):
    source = small.Bytes().decode(text.ids.tolist())
    lines = text.lines()
    assert "\n".join(line for _, _, line in lines).split() == source.split() and lines[-1][1] == TOKENS
    assert all(source[begin:end].strip("\n") == line for begin, end, line in lines)


def test_imports_and_definitions_are_remembered(text):
    ids = small.Bytes().encode("import a\n\nclass B:\n    x = 1\n\n" + "y = 2\n" * 300).ids
    made = {name: patterns.make(name, patterns.Text(small.Bytes(), ids), 176)[0] for name in ("code_memory", "outline")}
    text = small.Bytes().decode(ids)
    for name, seen in (("code_memory", ["import a", "class B"]), ("outline", ["class B"])):
        kept = made[name].to_mask(len(ids))[0, 0, -1]
        assert {part for part in ("import a", "class B", "x = 1") if kept[text.index(part) + 6]} >= set(seen)


def test_definitions_are_seen_where_they_are_named():
    source = "import abc\n\ndef one(first):\n    return 11\n\ndef two(second):\n    return 22\n\n" + "y = 2\n" * 100
    source += "def other():\n    return one(5)" + "\n    z = 3" * 30 + "\n    return two(6)"
    ids = small.Bytes().encode(source).ids
    kept = patterns.make("call_graph", patterns.Text(small.Bytes(), ids), 176)[0].to_mask(len(ids))[0, 0]

    def sees(row, part):
        return kept[row, source.index(part) : source.index(part) + len(part)].all()

    assert not sees(source.index("one(5)"), "return 11") and sees(source.index("(5)"), "return 11")
    assert not sees(source.index("(6)") - 1, "return 22") and sees(len(ids) - 1, "return 22\n")


@pytest.mark.parametrize("block, summary", [(16, "mean"), (32, "minmax")])
def test_block_topk_takes_the_blocks_of_the_largest_scores(block, summary, operands):
    choose = choices.BlockTopK(BUDGET, block, summary)
    keep = keys_of(None, choose, operands)
    q, k = operands.numpy()
    for row, head in [(300, 0), (511, 2), (440, 1)]:
        scores = {}
        for begin in range(patterns.SINKS, row - patterns.WINDOW + 1, block):
            keys = k[begin : begin + block, head]
            bound = np.maximum(q[row, head] * keys.max(axis=0), q[row, head] * keys.min(axis=0)).sum()
            scores[begin] = q[row, head] @ keys.mean(axis=0) if summary == "mean" else bound
        best = sorted(scores, key=scores.get)[-choose.count :]
        assert all(keep[head, row, begin : begin + block].all() for begin in best)
        others = keep[head, row].copy()
        others[: patterns.SINKS] = False
        for begin in best:
            others[begin : begin + block] = False
        assert not others.any() or others[np.argmax(others) : row + 1].sum() == others.sum()  # the rest is the window


def test_oracle_keeps_the_most_mass(text, operands):
    q, k = operands.numpy()
    s = np.where(np.tri(TOKENS, dtype=bool), q[:, 0] @ k[:, 0].T, -np.inf)
    p = np.exp(s - s.max(axis=1, keepdims=True))
    mass = {
        name: (p * keys_of(*patterns.make(name, text, BUDGET), operands)[0]).sum()
        for name in ("oracle", "block_topk_16_mean", "xref", "sink_window")
    }
    assert max(mass, key=mass.get) == "oracle"


def test_what_is_too_dense_or_too_small_is_refused(text):
    with pytest.raises(ValueError, match="accepted: at most 224"):
        patterns.filled(sa.causal(), TOKENS, BUDGET)
    with pytest.raises(ValueError, match="accepted for block_topk_64_mean: 160 or more"):
        patterns.make("block_topk_64_mean", text, 128)


# ---- spans and lines ----


def test_identifiers_are_far_near_or_new():
    words = ["alpha beta", *["xx"] * 150, "beta gamma", *["yy"] * 30, "alpha beta gam"]
    encoded = small.Bytes().encode(" ".join(words))
    spans = study.identifier_spans(small.Bytes().decode(encoded.ids), encoded.offsets, 20)
    found = [(small.Bytes().decode(encoded.ids[one.begin : one.end]), one.label) for one in spans]
    assert found == [("beta", "far"), ("gamma", "new"), ("alpha", "far"), ("beta", "near")]  # gam may go on


@pytest.mark.parametrize("task", tasks.TASKS)
@pytest.mark.parametrize("seed", [0, 5])
def test_answers_stand_above(task, seed):
    ids, spans, watched = tasks.make(task, seed, 1500, small.Bytes())
    text = small.Bytes().decode(ids)
    assert 1200 < len(ids) < 1800 and len(spans) == (tasks.QUESTIONS if not watched else tasks.CHOICES)
    assert len(watched) in (0, tasks.CHOICES) and (ids, spans, watched) == tasks.make(task, seed, 1500, small.Bytes())
    questions = spans[0].begin - 40
    for span in spans:
        answer = text[span.begin : span.end]
        assert answer in text[:questions] and re.fullmatch(r"\d+|\d+ \+ \d+|[A-Z]\w+|[a-z]+", answer)


def test_paraphrases_share_no_word_with_their_fact():
    for seed in range(20):
        text = small.Bytes().decode(tasks.make("paraphrase", seed, 3000, small.Bytes())[0])
        for role, country in re.findall(r"Home country of our (\w+): (\w+)", text):
            (fact,) = re.findall(rf"The (\w+) was born in {country}\.", text)
            assert fact != role and not {"home", "country", "of", "our", role} & {"the", fact, "was", "born", "in"}


def test_lines_survive_a_crash(tmp_path, capsys):
    results = lines.Results(tmp_path / "s1.jsonl")
    results.add({"id": "one", "nll": 1.0})
    with open(results.path, "a") as file:
        file.write('{"id": "two", "nl')
    assert lines.Results(results.path).known == {"one"} and "cut short" in capsys.readouterr().out
    lines.Results(results.path).add({"id": "two", "nll": 2.0})
    assert [line["id"] for line in lines.read_lines(results.path)] == ["one", "two"]


def test_tuning_takes_the_least_loss(tmp_path):
    tuned = [
        {"pattern": name, "kind": "novel", "document": n, "delta_nll": 0.1 * (1 + (name != "block_topk_32_mean"))}
        for n in range(2)
        for name in patterns.TOPK
    ]
    (tmp_path / "tune.jsonl").write_text("\n".join(map(json.dumps, tuned)))
    assert stages.best_topk(tmp_path / "tune.jsonl") == "block_topk_32_mean"
    (tmp_path / "tune.jsonl").write_text(json.dumps(tuned[0]))
    with pytest.raises(SystemExit, match="no document"):
        stages.best_topk(tmp_path / "tune.jsonl")


# ---- the whole ----


def test_small_stages_run_once(tmp_path):
    for stage in ("tune", "s1", "s2"):
        call = ["--stage", stage, "--small", "--results", str(tmp_path)]
        assert run.main(call) == 0
        path = tmp_path / f"{stage}.jsonl"
        before = path.read_text()
        assert run.main(call) == 0 and path.read_text() == before
    found = lines.read_lines(tmp_path / "s1.jsonl")
    names = {line["pattern"] for line in found}
    assert {"dense", "sink_window", "xref", "xref_ngrams", "strided", "bigbird"} <= names and len(names) == 20
    assert len({line["id"] for line in found}) == len(found) == 20 * len(small.documents())
    for line in found:
        assert line["pattern"] == "dense" or line["check"] < 1e-5 and 0 < line["mass"] <= 1 and line["kl"] > 0
    answers = [line["spans"] for line in lines.read_lines(tmp_path / "s2.jsonl")]
    assert all(len(one["right"]) == len(one["nll"]) >= 4 for spans in answers for one in spans.values())


def test_documents_are_left_out_and_counted_for_each_kind(tmp_path, monkeypatch):
    names = [("python", number) for number in range(5)] + [("novel", number) for number in range(2)]
    documents = [corpus.Document(kind, str(number), "", False, "") for kind, number in names]
    monkeypatch.setattr(corpus, "load", lambda cache, kinds: documents)

    def chosen(*more):
        options = run.read_options(["--stage", "s1", "--results", str(tmp_path), *more])
        return [document.kind[0] + document.name for document in run.load_documents(options, tuning=False)]

    assert chosen() == ["p0", "p1", "p2", "p3", "p4", "n0", "n1"]
    assert chosen("--skip", "2") == ["p2", "p3", "p4"]
    assert chosen("--skip", "1", "--documents", "2") == ["p1", "p2", "n1"]


def read_ids(folder, *more):
    """The documents in the order in which S1 reads them."""
    assert run.main(["--stage", "s1", "--small", "--patterns", "window", "--results", str(folder), *more]) == 0
    found = lines.read_lines(folder / "s1.jsonl")
    return [line["document"] for line in found if line["pattern"] == "window"]


def test_documents_are_read_in_turn_where_they_are_long_enough(tmp_path, monkeypatch):
    text = small.documents()[0].text
    sizes = [("python", 400), ("python", 700), ("python", 600), ("novel", 500), ("novel", 900)]
    documents = [corpus.Document(kind, f"{kind[0]}{size}", "", False, text[:size]) for kind, size in sizes]
    monkeypatch.setattr(small, "documents", lambda: documents)
    assert read_ids(tmp_path / "all") == ["p700", "n900", "p600"]
    assert read_ids(tmp_path / "first", "--part", "1/2") == ["p700", "p600"]
    assert read_ids(tmp_path / "second", "--part", "2/2") == ["n900"]
    for wrong in ("0/2", "3/2", "1"):
        with pytest.raises(SystemExit):
            run.main(["--stage", "s1", "--small", "--results", str(tmp_path), "--part", wrong])


def test_a_run_stops_in_time_and_goes_on(tmp_path, capsys):
    assert read_ids(tmp_path, "--seconds", "0") == []
    assert "Stopped after 0 s" in capsys.readouterr().out
    assert len(read_ids(tmp_path, "--seconds", "600")) == len(small.documents())


def test_results_of_random_models_have_no_home():
    with pytest.raises(SystemExit):
        run.main(["--stage", "s1", "--small"])


# ---- documents ----


def test_manifest_names_every_document():
    manifest = corpus.read_manifest()
    rule = manifest["rule"]
    for kind in manifest["kinds"]:
        tuning = [one["tuning"] for one in manifest["documents"] if one["kind"] == kind]
        assert sum(tuning) == rule["tuning"] and 0 < len(tuning) - sum(tuning) <= rule["documents"]
    assert all(re.fullmatch(r"[0-9a-f]{64}", one["sha256"]) for one in [*manifest["documents"], manifest["model"]])
    pages = [
        {re.sub(r"\.\w+$", "", one["name"]) for one in manifest["documents"] if one["kind"] == kind}
        for kind in ("markdown", "html", "json")
    ]
    assert pages[0] == pages[1] == pages[2]


def test_novel_is_chosen_as_the_manifest_says():
    """The one kind that needs no download, by the rule, as the others."""
    manifest = corpus.read_manifest()
    manifest["kinds"] = {name: kind for name, kind in manifest["kinds"].items() if name == "novel"}
    assert corpus.choose(manifest, None) == [one for one in manifest["documents"] if one["kind"] == "novel"]
    assert len(corpus.load(None, ["novel"])) == 17


def test_changed_text_is_refused(tmp_path, monkeypatch):
    kind = {"package": "p", "reader": "files", "under": "src/", "ending": ".py"}
    package = {"client": "pip", "requirement": "p==1", "file": "p-1.whl"}
    manifest = {
        "packages": {"p": package},
        "kinds": {"code": kind},
        "rule": {"least_characters": 5, "characters": 8, "tuning": 1, "documents": 2},
        "documents": [],
    }
    (tmp_path / "p").mkdir()

    def pack(**files):
        with zipfile.ZipFile(tmp_path / "p" / "p-1.whl", "w") as wheel:
            for name, text in files.items():
                wheel.writestr(f"src/{name}.py", text)
        package["sha256"] = corpus.sha256((tmp_path / "p" / "p-1.whl").read_bytes())

    pack(a="x = 12345", b="y = 1", c="=", d="z = 12345")
    monkeypatch.setattr(corpus, "read_manifest", lambda: manifest)
    manifest["documents"] = corpus.choose(manifest, tmp_path)
    assert sorted(one.name for one in corpus.load(tmp_path)) == ["a.py", "b.py", "d.py"]
    assert sum(one.tuning for one in corpus.load(tmp_path)) == 1
    assert {one.name: one.text for one in corpus.load(tmp_path)}["a.py"] == "x = 1234"
    pack(a="x = 54321", b="y = 1", c="=", d="z = 12345")
    with pytest.raises(corpus.CorpusError, match="a.py of code is not the text"):
        corpus.load(tmp_path)
    package["sha256"] = "0" * 64
    with pytest.raises(corpus.CorpusError, match="p-1.whl is not the file"):
        corpus.load(tmp_path)
    monkeypatch.setitem(corpus.COMMANDS, "pip", ["/nowhere/pip"])
    with pytest.raises(corpus.CorpusError, match="put p-1.whl into"):
        corpus.load(tmp_path / "empty")


def test_packed_texts_are_the_documents(tmp_path, monkeypatch):
    """texts.zip has what the packages have, in the same bytes each time, and its texts are checked, too."""
    manifest = corpus.read_manifest()
    manifest["kinds"] = {"novel": manifest["kinds"]["novel"]}
    manifest["documents"] = [one for one in manifest["documents"] if one["kind"] == "novel"]
    manifest["training"] |= {"packages": [], "sha256": corpus.sha256(b"")}
    monkeypatch.setattr(corpus, "read_manifest", lambda: manifest)
    documents = corpus.load(tmp_path)
    before = corpus.pack(tmp_path).read_bytes()
    monkeypatch.setattr(corpus, "candidates", None)
    assert corpus.load(tmp_path) == documents and corpus.pack(tmp_path).read_bytes() == before
    manifest["training"]["sha256"] = "0" * 64
    with pytest.raises(corpus.CorpusError, match="texts of S3"):
        corpus.training_texts(tmp_path)
    with zipfile.ZipFile(tmp_path / corpus.PACKED, "w") as package:
        package.writestr(f"novel/{documents[0].name}", "another text")
    with pytest.raises(corpus.CorpusError, match="is not the text"):
        corpus.load(tmp_path)
