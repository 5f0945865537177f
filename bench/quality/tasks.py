# SPDX-License-Identifier: MIT
"""S2: texts made from a seed, whose last lines ask for what stands far above. Answers are part of the text, and right
where the model, reading, holds each of their tokens for the likeliest: what greedy decoding would write.

json_lookup   the value of a key in a long JSON object
definition    what a function of a long Python file returns
variable      which of four variables of such a file was made of what is named now
same_words    a fact in a novel, asked for in the words in which it stands there
paraphrase    the same fact in words that share none with it: links between equal tokens must fail
"""

import random

import numpy as np
from sparseattn.demo import book
from study import Span

QUESTIONS, CHOICES = 8, 4
WORDS = (
    "amber birch cedar delta ember flint grove hazel ivory jade karst lilac maple noble ocean pearl quartz raven "
    "slate topaz umber velvet willow xenon yarrow zephyr"
).split()
CITIES = "Athens Berlin Cairo Dublin Geneva Lisbon Madrid Naples Oslo Prague Rome Vienna".split()
ACTIONS = "scale shift blend clamp trim merge split round count order".split()
# Of one meaning, without a common word; and countries with initials of their own, so that any tokenizer tells them
# apart by their first token.
ROLES = [
    ("physician", "doctor"),
    ("attorney", "lawyer"),
    ("instructor", "teacher"),
    ("burglar", "thief"),
    ("seaman", "sailor"),
    ("author", "writer"),
    ("monarch", "king"),
    ("infant", "baby"),
]
COUNTRIES = (
    "France Spain Italy Japan Brazil Egypt Canada Mexico Russia Norway Germany Kenya Peru Turkey Hungary".split()
)


def make(task, seed, tokens, tokenizer):
    """(ids, spans, watched) of one text of about so many tokens; watched are the answers to choose between."""
    above, questions = TASKS[task](random.Random(f"{task} {seed}"), tokens, tokenizer)
    text, places = above, []
    for question, answer, end in questions:
        text += question
        places.append((len(text), len(text) + len(answer)))
        text += answer + end
    encoded = tokenizer.encode(text)
    spans = [token_span(task, encoded.offsets, *place) for place in places]
    first = {encoded.ids[span.begin] for span in spans}
    return encoded.ids, spans, sorted(first) if task in CHOSEN else ()


def token_span(label, offsets, begin, end):
    """The tokens that bring the characters begin .. end."""
    ends, begins = [stop for _, stop in offsets], [start for start, _ in offsets]
    return Span(label, int(np.searchsorted(ends, begin, side="right")), int(np.searchsorted(begins, end, side="left")))


def as_many(draw, tokens, tokenizer):
    """Entries that draw() makes, each other than those before, until there are so many tokens."""
    entries, size = {}, 0
    while size < tokens:
        name, text, value = draw()
        if name not in entries:
            entries[name] = (text, value)
            size += len(tokenizer.encode(text).ids)
    return entries


def ask(rng, entries):
    """Names of entries that are asked for: spread over all but the nearest fifth."""
    names = list(entries)[: max(QUESTIONS, len(entries) * 4 // 5)]
    return rng.sample(names, min(QUESTIONS, len(names)))


def json_lookup(rng, tokens, tokenizer):
    def draw():
        name, value = f"{rng.choice(WORDS)}_{rng.choice(WORDS)}_{rng.randrange(10)}", str(rng.randrange(1000, 10000))
        return name, f'  "{name}": {value},\n', value

    entries = as_many(draw, tokens - 20 * QUESTIONS, tokenizer)
    above = "data = {\n" + "".join(text for text, _ in entries.values()) + "}\n\n"
    return above, [(f'assert data["{name}"] == ', entries[name][1], "\n") for name in ask(rng, entries)]


def definition(rng, tokens, tokenizer):
    def draw():
        name = f"{rng.choice(ACTIONS)}_{rng.choice(WORDS)}_{rng.choice(WORDS)}"
        value = f"{rng.randrange(10, 100)} + {rng.randrange(10, 100)}"
        return name, f"def {name}(value):\n    return value * {value}\n\n\n", value

    entries = as_many(draw, tokens - 25 * QUESTIONS, tokenizer)
    above = "".join(text for text, _ in entries.values())
    return above, [(f"assert {name}(x) == x * ", entries[name][1], "\n") for name in ask(rng, entries)]


def facts_in_novel(rng, tokens, tokenizer):
    """A passage with CHOICES facts in its first three quarters, and the facts: (role, another word for it, country)."""
    novel = book.text()
    lines = novel[novel.index("\n", rng.randrange(20_000, len(novel) - 12 * tokens)) + 1 :].split("\n")
    chosen, size = [], 0
    while size < tokens - 20 * CHOICES:
        chosen.append(lines[len(chosen)])
        size += len(tokenizer.encode(chosen[-1] + "\n").ids)
    facts = [(*roles, country) for roles, country in zip(rng.sample(ROLES, CHOICES), rng.sample(COUNTRIES, CHOICES))]
    for role, _, country in facts:
        chosen.insert(rng.randrange(max(1, len(chosen) * 3 // 4)), f"The {role} was born in {country}.")
    return "\n".join(chosen) + "\n\n", rng.sample(facts, CHOICES)


def same_words(rng, tokens, tokenizer):
    above, facts = facts_in_novel(rng, tokens, tokenizer)
    return above, [(f"The {role} was born in ", country, ".\n") for role, _, country in facts]


def paraphrase(rng, tokens, tokenizer):
    above, facts = facts_in_novel(rng, tokens, tokenizer)
    return above, [(f"Home country of our {other}: ", country, ".\n") for _, other, country in facts]


def variable(rng, tokens, tokenizer):
    """Functions, and between them CHOICES assignments of which each variable is asked for by what it was made of."""

    def draw():
        name = f"{rng.choice(ACTIONS)}_{rng.choice(WORDS)}_{rng.choice(WORDS)}"
        return name, f"def {name}(value):\n    return value * {rng.randrange(10, 100)}\n\n\n", None

    entries = [text for text, _ in as_many(draw, tokens - 40 * CHOICES, tokenizer).values()]
    facts = list(zip(rng.sample(CITIES, CHOICES), rng.sample(WORDS, CHOICES)))
    for city, name in facts:
        entries.insert(rng.randrange(max(1, len(entries) * 3 // 4)), f'{name} = open_channel("{city}")\n\n\n')
    return "".join(entries), [(f'close_channel("{city}", ', name, ")\n") for city, name in rng.sample(facts, CHOICES)]


TASKS = {"json_lookup": json_lookup, "definition": definition, "variable": variable, "same_words": same_words}
TASKS |= {"paraphrase": paraphrase}
CHOSEN = ("variable", "same_words", "paraphrase")  # whose answers are also judged as a choice among all of a text
