# SPDX-License-Identifier: MIT
"""Words that had several meanings and have one now must not come back in the others; src/README.md has the glossary.
And comments are sentences: none begins with "Of"."""
import re

SUFFIXES = (".h", ".hpp", ".cpp", ".c", ".cuh", ".cu", ".inc")
FLOORS = ("src", "cuda", "tests", "bench", "include")

# (what must not be found, what is said instead)
BANNED = [
    (r"\bclass_of\b|\bclass_id\b|\blist_class\b|\bfind_classes\b|\bclasses of heads\b|\bclass of heads\b",
     "kind_of_head, head_kind: heads that see the same keys are of one kind"),
    (r"\bin_class\b|\bclass_tiles\b|\b\w+_in_class\b", "in_residue, residue_tiles: a class is one of residues"),
    (r"\bRun(Args|Lists|ListRows)\b|\brun_lists\b(?!\.pattern)(?!\")|\b(Forward|Backward)Run\b|\bRowsOfRun\b",
     "CallArgs, CallLists, call_lists: a run is one of blocks, what a user makes is a call"),
    (r"\b(each|every) run brings\b|\ba run brings\b|\bruns bring\b|\blists of a run\b", "what a call brings"),
    (r"\bwork orders?\b|\b(take|next|close|first|start|place|sum|sort)_orders?\b|\bOrderSpace\b|\btasks\.orders\b",
     "queue: an order is one of tokens, what a worker does one after the other is a queue"),
    (r"\b(Plan|Pass|Piece)Image\b|\bmake_image\b|plan/image\.h", "PlacedPlan, place_plan(): an image is a picture"),
    (r"\bfind_moved\b|\bmove_tokens\b|\bmoved (tokens|tiles)\b", "hot tokens, which are away from home"),
    (r"\bstruct Part\b", "a name that says of what"),
]
COMMENT = re.compile(r"//\s?(.*)|/\*+\s?(.*)")


def sources(root):
    return sorted(path for floor in FLOORS for path in (root / floor).rglob("*") if path.suffix in SUFFIXES)


def banned(root):
    for path in sources(root):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            for pattern, instead in BANNED:
                if match := re.search(pattern, line):
                    yield f"{path}:{number}: {match[0]}; say {instead}"


def comments(path):
    """(line number, text) of the first line of each comment, and of each paragraph in it."""
    begins = True
    for number, line in enumerate(path.read_text().splitlines(), 1):
        match = COMMENT.search(line)
        text = (match[1] or match[2] or "") if match else ""
        stands_alone = match and not line[:match.start()].strip()
        if text and (begins or not stands_alone):
            yield number, text
        begins = not (stands_alone and text)


def without_subject(root):
    for path in sources(root):
        for number, text in comments(path):
            if re.match(r"Of\b", text):
                yield f"{path}:{number}: a comment that begins with 'Of': {text}"
