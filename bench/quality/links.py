# SPDX-License-Identifier: MIT
"""The links of xref in Python, by what brought them. The library makes masks of them and does not say which link a key
came from, nor does it append links in another order; test_links.py holds the two to each other."""

import collections

ORDER = ("ngrams", "open", "recent")  # of the definition: the last tokens, the open identifier, those used just now
BEFORE, AFTER, NGRAM_KEYS, LOOK_BACK, STOP_RATIO = 3, 10, 7, 32, 48


def links_of(ids, symbols, sinks, window, budget, order=ORDER):
    """For each token of a text {key: the one of ORDER that brought it}, in the order in which keys are linked.

    ids, symbols, sinks, window, budget  as sparseattn.xref takes them; symbols [tokens, 2] must be there
    """
    most = max(0, min(budget // 2, budget - sinks - window))
    ids, opened, completed = ids.tolist(), symbols[:, 0].tolist(), symbols[:, 1].tolist()
    ngrams, places, times = (collections.defaultdict(list) for _ in range(3))
    rows = []
    for row, symbol in enumerate(opened):
        far, linked = row - window, {}
        times[symbol].append(row)
        if far >= 0:  # what was read a window ago can be linked from now on
            places[opened[far]].append(far)
            for size in (4, 3, 2):
                if far >= size:
                    ngrams[tuple(ids[far - size : far])].append(far - 1)
        found = {
            "ngrams": (
                (place, place + NGRAM_KEYS - 1)
                for size in (4, 3, 2)
                for place in ngrams[tuple(ids[max(0, row - size + 1) : row + 1])][:-4:-1]
            ),
            "open": (around(place) for place in latest_and_first(places[symbol], 2) if symbol >= 0),
            "recent": (
                around(place)
                for used in completed[max(0, row - LOOK_BACK + 1) : row + 1][::-1]
                if used >= 0 and len(times[used]) <= max(row // STOP_RATIO, 4)
                for place in latest_and_first(places[used], 1)
            ),
        }
        for name in order:
            for first, last in found[name]:
                for key in range(max(first, sinks), min(last, far) + 1):
                    if len(linked) < most:
                        linked.setdefault(key, name)
        rows.append(linked)
    return rows


def around(place):
    return place - BEFORE, place + AFTER


def latest_and_first(places, latest):
    return [*places[: -latest - 1 : -1], *places[:1]]
